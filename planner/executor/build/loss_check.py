"""Check that the losses of micro-batches add up to the loss of their mini-batch.

A pipeline computes the weighted mean of the losses of its micro-batches. This mean equals the loss of the mini-batch
only if the loss is a mean. The check compares the loss of a few samples with the losses of their two halves. The model
is in evaluation mode, because dropout and batch normalization would make the losses differ.

Some models compute their own loss from labels among the inputs. For these models, the check masks some labels to find
over which labels the loss averages.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.profile import CountedLabels
from planner.core.values.units import pluralize
from planner.device.machine import available_bytes
from planner.executor.build.building import accumulated_leaf_ids
from planner.executor.run.losses import loss_counts
from planner.executor.run.parts import micro_batches_of
from planner.executor.run.stage_module import evaluation_mode
from planner.model.batch_norm import uses_batch_in_evaluation
from planner.model.calling import arguments_of
from planner.model.differentiation import without_fake_tensor_log
from planner.model.label_counts import MASKED, label_count
from planner.model.lean import build_lean
from planner.model.load import Batch, LoadedModel, to_device
from planner.model.module_tensors import copy_buffers_temporarily, parameters_as_ghosts
from planner.model.nests import flatten, tensors_in, unflatten
from planner.model.operators import OperatorWatch
from planner.model.refusals import RefusedLossError, check_scalar_loss
from planner.model.seeding import seed_process, seeded_draws
from planner.model.variables import undo_variable_changes

# Half of two samples is one sample. Some models drop the dimension of one sample (`squeeze`), so 2 is the last choice.
_SAMPLES: Final = (4, 2)
"""Numbers of samples to try, in order."""

_MOST_BYTES: Final = 1_350_000_000
"""Largest model whose losses are compared: bytes of its parameters and of `_OUTPUT_COPIES` copies of its output."""

_OUTPUT_COPIES: Final = 4
"""Number of copies of the model's output in memory while the loss is computed."""

_MOST_S: Final = 3.0
"""Upper bound on the seconds of the first forward; the losses of slower models are not compared."""

_LEAST_LOSS: Final = 1e-2
"""Smallest loss to which the tolerance is relative. All smaller losses have the same absolute tolerance."""

_UNSEEN: Final = 1e-3
"""Accepted error of the mean of two losses, as a share of the difference between these losses."""

_LEAST_LABELS: Final = 4
"""Smallest number of labels per sample that `_mask_labels` can mask."""

_NOT_IN_GRAPH: Final = "appears to not have been used in the graph"
"""Part of torch's error message if a result is differentiated by a tensor on which it does not depend."""

_LABELS: Final[Mapping[CountedLabels, str]] = {
    "all": "labels that are not -100",
    "shifted": "labels that are not -100, except for the first of each row",
}


class CheckedLoss(NamedTuple):
    """Result of `check_loss`: the model, and notes and warnings for the user."""

    loaded: LoadedModel
    """Model, with the labels over which its own loss averages in `counted_labels`."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class _LossesOfHalves(NamedTuple):
    """Loss of a few samples, and the losses of the two halves of these samples."""

    whole: float
    first: float
    second: float
    tolerance: float
    """Largest relative error of a loss that is accepted as rounding."""

    def is_weighted_mean(self, counts: tuple[float, float]) -> bool:
        # Losses that nearly cancel have larger rounding errors, so a small part of the halves' difference is accepted.
        # Wrong weights result in a larger part.
        return self.error_of_mean(counts) <= max(self._rounding, _UNSEEN * abs(self.first - self.second))

    def error_of_mean(self, counts: tuple[float, float]) -> float:
        total = sum(counts)
        mean = (self.first * counts[0] + self.second * counts[1]) / total if total else float("inf")
        return abs(self.whole - mean)

    def is_sum(self) -> bool:
        return abs(self.whole - self.first - self.second) <= self._rounding

    @property
    def _rounding(self) -> float:
        return self.tolerance * max(_LEAST_LOSS, *map(abs, (self.whole, self.first, self.second)))


def check_loss(loaded: LoadedModel) -> CheckedLoss:
    """Find the weights of micro-batch losses, and check that their weighted mean is the loss of the mini-batch.

    The model runs on the CPU, or on the device where `build_model` puts it. If it cannot run, no losses are compared.

    Returns:
        The model, and notes and warnings for the user. If the model computes its loss from labels among its inputs, its
        field `counted_labels` is set. A warning reports a loss of the mini-batch that is not the weighted mean.

    Raises:
        ModelError: `loss_fn` reads parameters of the model or tensors that `forward` does not return, or `loss_count`
            does not return a valid number.
    """
    with seeded_draws(0):
        try:
            return _checked(loaded)
        except RefusedLossError:
            raise
        except (Exception, SystemExit):  # The equivalence check or the profile reports such errors.
            return CheckedLoss(loaded, (), ())


def _checked(loaded: LoadedModel) -> CheckedLoss:
    lean = build_lean(loaded.build)
    batches = [loaded.example_batch(samples) for samples in _SAMPLES]
    budget_bytes = min(_MOST_BYTES, available_bytes() // 4)
    fitting = [batch for batch in batches if _check_and_estimate_bytes(loaded, lean, batch) <= budget_bytes]
    if not fitting:
        return _assume_counting_rule(loaded, lean, batches[0])
    model = loaded.build()
    with _undoing_changes(model, loaded), evaluation_mode(model):
        return _compare_halves(loaded, model, fitting[0])


def _check_and_estimate_bytes(loaded: LoadedModel, model: nn.Module, batch: Batch) -> int:
    parameter_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
    try:
        with _undoing_changes(model, loaded), parameters_as_ghosts(model), without_fake_tensor_log():
            output, targets = _output_of(model, batch)
            _refuse_parameters_in_loss(loaded, model, output, targets)
    except RefusedLossError:
        raise
    except (Exception, SystemExit):  # The model reads values, or has an error that the profile will report.
        return parameter_bytes
    return parameter_bytes + _OUTPUT_COPIES * sum(t.numel() * t.itemsize for t in tensors_in(output))


@contextmanager
def _undoing_changes(model: nn.Module, loaded: LoadedModel) -> Iterator[None]:
    with undo_variable_changes(model, loaded.loss_fn), copy_buffers_temporarily(model):
        yield


def _refuse_parameters_in_loss(loaded: LoadedModel, model: nn.Module, output: Any, targets: Any) -> None:
    leaves, nest = flatten(output)
    cut = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    objects = [dict(vars(leaf)) for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor)]
    operands: set[int] = set()
    with OperatorWatch(before=lambda _, args, kwargs: operands.update(map(id, tensors_in((args, kwargs))))):
        loss = _loss_of_detached(loaded, unflatten(cut, nest), targets)
    if model.training:  # in evaluation mode, some models return another output
        check_scalar_loss(loss)
    read_ids = accumulated_leaf_ids(tensors_in(loss))
    read_ids -= accumulated_leaf_ids(
        tensors_in(objects)
    )  # the output may be an object with tensors, like a distribution
    names = {id(p): name for name, p in model.named_parameters() if id(p) in read_ids}
    if names and operands.isdisjoint(names):
        raise RefusedLossError(
            "`loss_fn` reads a tensor that `forward` computes but does not return, such as a loss in an attribute: the "
            "last stage of a pipeline gets only what `forward` returns",
            hint="let `forward` return the tensor (`return logits, loss`), and read it from the output in `loss_fn`",
        )
    if names:
        first, *others = names.values()
        more = f" and {pluralize(len(others), 'other')}" if others else ""
        raise RefusedLossError(
            f'`loss_fn` reads parameters of the model ("{first}"{more}): the last stage of a pipeline does not have '
            "parameters of other stages, so this part of their gradients would be lost",
            hint="for a penalty on weights give the optimizer a `weight_decay` (k * sum(p ** 2) is a weight decay of "
            "2 * k with SGD), or compute it in the `forward` of the module that has the parameters and return it; let "
            "`forward` return parameters that the loss trains (for example weights of tasks)",
        )


def _loss_of_detached(loaded: LoadedModel, output: Any, targets: Any) -> Any:
    try:
        return _fresh_loss(loaded)(output, targets)
    except RuntimeError as error:
        if _NOT_IN_GRAPH not in str(error):
            raise
        raise RefusedLossError(
            "`loss_fn` differentiates the model (`torch.autograd.grad` of an output with respect to an input or an "
            "activation): the last stage of a pipeline does not have the layers in between",
            hint="let `loss_fn` differentiate only what it computes itself from the output, or train on one device",
        ) from error


def _output_of(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    inputs, targets = to_device(tuple(batch), device)
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs), targets


def _fresh_loss(loaded: LoadedModel) -> Any:
    # The default loss chooses a formula for its first output, and keeps it. Outputs in evaluation mode may need another
    # formula than outputs in training, so copy the default loss.
    return copy.copy(loaded.loss_fn) if loaded.loss_fn is loaded.default_loss else loaded.loss_fn


def _compare_halves(loaded: LoadedModel, model: nn.Module, batch: Batch) -> CheckedLoss:
    is_counted = _has_labels(loaded, batch)
    masked = _mask_labels(batch) if is_counted else batch
    if masked is None:
        return _assume_counting_rule(loaded, model, batch)
    first, second = (Batch(*half) for half in micro_batches_of(tuple(masked), 2))
    halves = first, second
    losses = _losses_of_halves(loaded, model, masked, halves)
    if losses is None:
        # Models that ignore another label than -100 may fail with masked labels.
        return _check_without_masks(loaded, model, batch) if is_counted else CheckedLoss(loaded, (), ())
    if not is_counted:
        counts = (1.0, 1.0)
        if loaded.loss_count is not None:
            counts = _given_counts(loaded, loaded.loss_count, halves)
        return CheckedLoss(loaded, (), () if losses.is_weighted_mean(counts) else (_no_mean_warning(losses),))
    assumed = _assume_counting_rule(loaded, model, batch)
    # Try the assumed rule first, because several rules fit if no label could be masked.
    rules: tuple[CountedLabels, ...] = (assumed.loaded.counted_labels, "all", "shifted", "")
    for rule in rules:
        if losses.is_weighted_mean(_counts(halves, rule)):
            return _with_counting_rule(loaded, rule)
    # Equal weights only scale the gradients of a sum. Other weights also change their direction.
    closest = "" if losses.is_sum() else min(rules, key=lambda rule: losses.error_of_mean(_counts(halves, rule)))
    return _with_counting_rule(loaded, closest)._replace(warnings=(_no_mean_warning(losses),))


def _check_without_masks(loaded: LoadedModel, model: nn.Module, batch: Batch) -> CheckedLoss:
    assumed = _assume_counting_rule(loaded, model, batch)
    first, second = (Batch(*half) for half in micro_batches_of(tuple(batch), 2))
    losses = _losses_of_halves(loaded, model, batch, (first, second))
    if losses is None or losses.is_weighted_mean(_counts((first, second), assumed.loaded.counted_labels)):
        return assumed
    return CheckedLoss(loaded, (), (_no_mean_warning(losses),))


def _given_counts(
    loaded: LoadedModel, loss_count: Callable[[Any], Any], halves: tuple[Batch, Batch]
) -> tuple[float, float]:
    try:
        first, second = loss_counts(loss_count, [half.targets for half in halves], loaded.source)
    except ModelError as error:
        raise RefusedLossError(error.message, hint=error.hint) from error
    return first, second


def _assume_counting_rule(loaded: LoadedModel, model: nn.Module, batch: Batch) -> CheckedLoss:
    if not _has_labels(loaded, batch):
        return CheckedLoss(loaded, (), ())
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    # Classes of transformers with an unknown name have this loss function, too, also with one label per sample.
    is_shifted = name == "ForCausalLMLoss" and not is_encoder_decoder and batch.inputs["labels"].ndim > 1
    return _with_counting_rule(loaded, "shifted" if is_shifted else "all")


def _with_counting_rule(loaded: LoadedModel, rule: CountedLabels) -> CheckedLoss:
    if not rule:
        return CheckedLoss(loaded, (), ())
    note = (
        f"the model's own loss is a mean over {_LABELS[rule]}: each micro-batch is weighted by its number of these "
        "labels, as with `num_items_in_batch`"
    )
    return CheckedLoss(replace(loaded, counted_labels=rule), (note,), ())


def _has_labels(loaded: LoadedModel, batch: Batch) -> bool:
    if loaded.loss_count is not None or tensors_in(batch.targets) or not isinstance(batch.inputs, dict):
        return False
    labels = batch.inputs.get("labels")
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _mask_labels(batch: Batch) -> Batch | None:
    labels = batch.inputs["labels"].clamp(min=0)
    if labels.ndim < 2:
        return batch  # one label per sample
    if labels.shape[-1] < _LEAST_LABELS:
        return None  # too few labels per sample to mask some
    # Each counting rule gives the first half another weight: 1/2 for samples, 2/5 for labels that are not -100, and 1/4
    # if the first label of each row does not count either (as in a language model that shifts labels).
    kept = torch.full_like(labels, MASKED)
    half = len(labels) // 2
    kept[:half, ..., :2] = labels[:half, ..., :2]
    kept[half:, ..., 1:4] = labels[half:, ..., 1:4]
    return batch._replace(inputs={**batch.inputs, "labels": kept})


def _counts(halves: tuple[Batch, Batch], rule: CountedLabels) -> tuple[float, float]:
    if not rule:
        return 1.0, 1.0
    return label_count(halves[0].inputs, rule), label_count(halves[1].inputs, rule)


def _losses_of_halves(
    loaded: LoadedModel, model: nn.Module, batch: Batch, halves: tuple[Batch, Batch]
) -> _LossesOfHalves | None:
    if uses_batch_in_evaluation(model):
        return None
    try:
        begin = time.monotonic()
        first = _loss(loaded, model, halves[0], seed=0)
        if time.monotonic() - begin > _MOST_S:
            return None
        second = _loss(loaded, model, halves[1], seed=1)
        whole, again = (_loss(loaded, model, batch, seed=seed) for seed in (2, 3))
    except RefusedLossError:
        raise
    except (Exception, SystemExit):  # In evaluation mode, some models return another output, or no loss.
        return None
    is_finite = all(abs(loss) < float("inf") for loss in (whole, first, second))
    tolerance = max(
        (_rounding_tolerance(p.dtype) for p in model.parameters()), default=_rounding_tolerance(torch.float32)
    )
    is_steady = abs(whole - again) <= tolerance * abs(whole)
    return _LossesOfHalves(whole, first, second, tolerance) if is_finite and is_steady else None


def _rounding_tolerance(dtype: torch.dtype) -> float:
    return 100 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _loss(loaded: LoadedModel, model: nn.Module, batch: Batch, *, seed: int) -> float:
    seed_process(seed)
    with torch.no_grad():
        output, targets = _output_of(model, batch)
    # Check with real values, because a loss that reads values could not be checked with tensors without values.
    _refuse_parameters_in_loss(loaded, model, output, targets)
    with torch.no_grad():
        return float(_fresh_loss(loaded)(output, targets))


def _no_mean_warning(losses: _LossesOfHalves) -> str:
    return (
        f"the loss is not a mean over samples: {losses.whole:.6g} for a few samples, {losses.first:.6g} and "
        f"{losses.second:.6g} for their halves; so micro-batches train another loss than the whole mini-batch; define "
        "`loss_count(target)` if the loss is a mean over something else (tokens that are not masked, the sum of class "
        'weights), use `reduction="mean"` instead of a sum, and plan a loss that compares samples with '
        "`--micro-batches 1`"
    )
