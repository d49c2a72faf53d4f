"""Train the reference of the equivalence check: the user's model in a plain training loop, uncut and unwrapped.

    for step in range(steps):
        for each micro-batch:                    # as in the pipeline
            loss = loss_fn(model(inputs), targets) * weight
            loss.backward()
        optimizer.step()

The loop uses no code of the executor. It differs from a usual loop in two ways, so that a pipeline can equal it:

- Every layer draws random numbers from its own seed (`planner.model.seeding`).
- Running statistics of batch normalization are those of the whole mini-batch (docs/cost-model.md).

In each step, the state is written to a file after the backward and after the optimizer's update.

Late steps (`ReferenceOptions.late_steps`) are additional. They reach code of the model that has no effect in the first
steps, such as `if self.calls == 10:`, or a branch for large values.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from planner.core.errors import ModelError
from planner.core.values.units import pluralize
from planner.model.autocast import autocast_dtype
from planner.model.backward_code import record_called_functions
from planner.model.calling import arguments_of, intercept_calls
from planner.model.gradient_files import keep_gradients_in_files
from planner.model.label_counts import label_count
from planner.model.lean import allocate_parameters
from planner.model.load import Batch, LoadedModel
from planner.model.precision import convert_if_needed
from planner.model.python_state import numbers_in_attributes, numbers_in_user_files, without_leftover_tensors
from planner.model.reference_norms import whole_mini_batch_statistics
from planner.model.reference_state import (
    END,
    BackwardEffects,
    ReferenceState,
    initial_state,
    state_after_backward,
    state_after_update,
)
from planner.model.seeding import example_mini_batch, host_generator_states, layer_seed, seed_host, seed_process
from planner.model.shortened import SkippedModule, shorten_model

_LOSS_SCALE = 2.0**16
"""Initial loss scale under `fp16-mixed`, which is halved after each overflow."""

_CPU = torch.device("cpu")

_LATE_S = 0.25
"""Time limit of late steps in seconds of CPU time, so that other processes do not reduce the number of steps."""


@dataclass(frozen=True, kw_only=True)
class LayerStart:
    """Point in a forward at which a layer starts: the start or the end of a module call."""

    path: str
    call: int
    """1 for the first call of the module `path` in a forward, 2 for its second call, and so on."""
    at_end: bool
    """True if the layer starts at the end of the call, False if at its start."""


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Options of the reference training loop."""

    seed: int
    steps: int
    micro_batches: int
    micro_batch_size: int
    starts: tuple[LayerStart | None, ...]
    """Start of each layer except the first; None if no module call ends at this point or starts after it."""
    late_steps: int = 0
    """Largest number of late steps. They follow the first `steps` steps, and begin within `_LATE_S` s of CPU time."""
    updates: bool = True
    """True to update parameters with the optimizer; False to compute only the gradients of one step."""
    skipped: tuple[SkippedModule, ...] = ()
    """Modules that return their input, to shorten the model."""
    lean: bool = False
    """True to build the model with random values in place of the user's. Skipped layers then take no memory."""


def train_reference(
    loaded: LoadedModel, options: ReferenceOptions, folder: Path | None, perturb: "Perturbation | None" = None
) -> list[float]:
    """Train the model in a plain loop, write its states to `folder`, and return the loss of every step.

    The files are `initial`, for every step N `gradients-N` and `updated-N`, and `end`.

    After `options.steps` steps, the loop runs up to `options.late_steps` additional steps, the late steps. An error in
    a late step may be due to the example data, so the loop then ends without an exception. A `ModelError` is
    raised even in late steps, unless its reason is a loss that is not finite.

    Args:
        loaded: The model.
        options: Options of the loop.
        folder: Folder for the files; None to write none.
        perturb: Function that changes parameters slightly before the last step, to measure how rounding errors grow.

    Raises:
        ModelError: The loss is not finite before the late steps, or does not depend on trained parameters.
    """

    def write(name: str, state: Callable[[], ReferenceState]) -> None:
        if folder is not None:
            state().save(folder / name)

    seed_process(options.seed)
    model = _built(loaded, options)
    losses: list[float] = []
    parameters, saved = {name for name, _ in model.named_parameters()}, _saved_names(model)
    write("initial", partial(initial_state, loaded, model))
    if folder is not None and options.lean:
        ReferenceState.load(folder / "initial").use_as_parameters(dict(model.named_parameters(remove_duplicate=False)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if folder is not None and not options.updates:
        keep_gradients_in_files(trained, folder)
    optimizer = loaded.build_optimizer(model.parameters()) if options.updates else None
    scale = _LOSS_SCALE if loaded.precision == "fp16-mixed" else 1.0
    with _seeded_layers(model, options) as begin_micro_batch:
        for step in _steps(options):
            if perturb is not None and step == options.steps - 1:
                perturb(model)
            try:
                loss, backward = _loss(model, loaded, options, step, scale=scale, begin=begin_micro_batch)
            except Exception as error:
                _raise_unless_late(error, step, options)
                break
            _refuse_new_parameters(model, parameters)
            _refuse_other_buffers(model, saved)
            scale = _unscale(trained, scale)
            losses.append(loss)
            write(f"gradients-{step}", partial(state_after_backward, loaded, model, loss, backward))
            if optimizer is None:
                break
            optimizer.step()
            write(f"updated-{step}", partial(state_after_update, model, loss, optimizer))
            optimizer.zero_grad()
    write(END, lambda: ReferenceState(loss=0.0, tensors={}, numbers={}, groups={}))
    return losses


Perturbation = Callable[[nn.Module], None]


class _NotFiniteError(ModelError):
    pass


def _steps(options: ReferenceOptions) -> Iterator[int]:
    yield from range(options.steps)
    end_s = time.process_time() + _LATE_S
    for step in range(options.steps, options.steps + options.late_steps):
        if time.process_time() > end_s:
            return
        yield step


def _raise_unless_late(error: Exception, step: int, options: ReferenceOptions) -> None:
    # Late steps may fail for example data, and succeed for the user's own data. But a `ModelError` is always raised,
    # except for a loss that is not finite.
    is_refusal = isinstance(error, ModelError) and not isinstance(error, _NotFiniteError)
    if step < options.steps or is_refusal:
        raise error


def _loss(
    model: nn.Module,
    loaded: LoadedModel,
    options: ReferenceOptions,
    step: int,
    *,
    scale: float,
    begin: Callable[[int, int], None],
) -> tuple[float, BackwardEffects]:
    with whole_mini_batch_statistics(model):
        batch = example_mini_batch(
            loaded, options.micro_batches * options.micro_batch_size, seed=options.seed, step=step
        )
        batches = _micro_batches(batch, options)
        loss, backward = _accumulate(model, loaded, batches, scale=scale, begin_micro_batch=partial(begin, step))
    if scale == 1.0 and not math.isfinite(loss):
        with_samples = f"with micro-batches of {pluralize(options.micro_batch_size, 'sample')}"
        hint = "check `loss_fn` and the learning rate; deviations over the batch need two samples or more"
        raise _NotFiniteError(f"the loss is {loss} in step {step} of a plain loop, {with_samples}", hint=hint)
    return loss, backward


def _built(loaded: LoadedModel, options: ReferenceOptions) -> nn.Module:
    model = convert_if_needed(shorten_model(loaded, options.skipped, lean=options.lean).build(), loaded.precision)
    if options.lean:
        allocate_parameters([model], model, _CPU)
    return model


def _accumulate(
    model: nn.Module,
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    scale: float,
    begin_micro_batch: Callable[[int], None],
) -> tuple[float, BackwardEffects]:
    total, changed, functions = 0.0, "", list[str]()
    for number, (batch, weight) in enumerate(zip(batches, _weights(loaded, batches), strict=True)):
        if not weight:
            continue
        args, kwargs = arguments_of(batch.inputs)
        begin_micro_batch(number)
        dtype = autocast_dtype(loaded.precision)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loaded.loss_fn(model(*args, **kwargs), batch.targets)
        total += float(loss.detach()) * weight
        if _has_gradient(model, loss):
            before, drawn, versions = _values(model, loaded), _generators(), _versions(model)
            with record_called_functions(functions):
                (loss * weight * scale).sum().backward()
            _refuse_changes(before, _values(model, loaded))
            _refuse_draws(drawn)
            after = _versions(model)
            changed = changed or next((name for name in after if after[name] != versions.get(name, after[name])), "")
    return total, BackwardEffects(changed=changed, runs_model_code=bool(functions))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return identity and version counter of each buffer and frozen parameter."""
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return {name: (id(tensor), tensor._version) for name, tensor in (*frozen, *model.named_buffers())}


def _refuse_new_parameters(model: nn.Module, names: Collection[str]) -> None:
    new = next((name for name, _ in model.named_parameters() if name not in names), "")
    if new:
        raise ModelError(
            f'`forward` makes the parameter "{new}" after the optimizer was built, so nothing would train it',
            hint="make it in `__init__`, or run the model once in `build_model`",
        )


def _refuse_other_buffers(model: nn.Module, names: set[str]) -> None:
    other = min(_saved_names(model) ^ names, default="")
    if other:
        raise ModelError(
            f'`forward` {"removes" if other in names else "makes"} the buffer "{other}": the state dict of a trained '
            "model has other names than that of a new model, so a run could not be resumed",
            hint="register it in `__init__` with a tensor, or with `persistent=False` if `forward` can make it again",
        )


def _saved_names(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _values(model: nn.Module, loaded: LoadedModel) -> dict[str, float]:
    numbers = numbers_in_attributes(dict(model.named_modules())) | numbers_in_user_files(model, loaded.loss_fn)
    return without_leftover_tensors(numbers, ())


def _refuse_changes(before: Mapping[str, float], after: Mapping[str, float]) -> None:
    for name, value in after.items():
        if name in before and value != before[name] and not math.isnan(value):
            raise ModelError(
                f'a backward changes the number "{name.rpartition(":")[2]}", which `forward` may read: a pipeline runs '
                "forwards of several micro-batches before the first backward",
                hint="keep what only hooks use in a variable of the function that makes the hooks (`nonlocal`); if "
                "backward calls `forward` again, as `odeint_adjoint` does, remove counters such as `self.nfe` from it",
            )


def _generators() -> tuple[object, ...]:
    return torch.initial_seed(), torch.get_rng_state().numpy().tobytes(), *host_generator_states()


def _refuse_draws(before: tuple[object, ...]) -> None:
    after = _generators()
    # A backward that first sets a seed, as reversible layers do, draws the same numbers in a stage.
    if after != before and after[0] == before[0]:
        raise ModelError(
            "a backward draws random numbers (in a hook, or in the backward of an autograd function): stages would "
            "draw others than a plain loop does",
            hint="draw them in `forward` (`ctx.save_for_backward`), or add the noise to the input of the layer; use "
            "`torch.utils.checkpoint` for a function that backward runs again (it restores the generators)",
        )


def _has_gradient(model: nn.Module, loss: Tensor) -> bool:
    if not loss.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
        hint = "look for `detach()`, `.item()` or `no_grad` between the parameters and the loss"
        raise ModelError("the loss carries no gradient, so nothing would be trained", hint=hint)
    return loss.requires_grad


def _micro_batches(batch: Batch, options: ReferenceOptions) -> list[Batch]:
    size = options.micro_batch_size
    return [
        Batch(*tree_map_only(Tensor, itemgetter(slice(first, first + size)), tuple(batch)))
        for first in range(0, options.micro_batches * size, size)
    ]


def _weights(loaded: LoadedModel, batches: Sequence[Batch]) -> list[float]:
    if loaded.loss_count is not None:
        counts = [float(loaded.loss_count(batch.targets)) for batch in batches]
    elif loaded.counted_labels and all(isinstance(b.inputs, dict) and "labels" in b.inputs for b in batches):
        counts = [label_count(batch.inputs, loaded.counted_labels) for batch in batches]
    else:
        counts = [1.0] * len(batches)
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


def _unscale(trained: Sequence[nn.Parameter], scale: float) -> float:
    """Divide gradients by the loss scale; delete all gradients if one overflowed. Return the scale of the next step."""
    if scale == 1.0:
        return scale
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad = parameter.grad / scale if is_finite else None
    return scale if is_finite else scale / 2


@contextmanager
def _seeded_layers(model: nn.Module, options: ReferenceOptions) -> Iterator[Callable[[int, int], None]]:
    """Seed the random generators at the start of every layer in the `with` block.

    Yields a function to call before each micro-batch, with the indices of step and micro-batch.
    """
    layer_at = {
        (id(model.get_submodule(start.path)), start.call, start.at_end): layer
        for layer, start in enumerate(options.starts, start=1)
        if start is not None
    }
    calls: Counter[tuple[int, bool]] = Counter()
    now = [0, 0]

    def plant(layer: int) -> None:
        seed_host(layer_seed(options.seed, now[0], layer, now[1]))

    def passed(module: nn.Module, *, at_end: bool) -> None:
        if torch.compiler.is_compiling():
            return
        calls[id(module), at_end] += 1
        layer = layer_at.get((id(module), calls[id(module), at_end], at_end))
        if layer is not None:
            plant(layer)

    def begin_micro_batch(step: int, micro_batch: int) -> None:
        now[:] = step, micro_batch
        calls.clear()
        plant(0)

    def run_compiled(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        passed(module, at_end=False)
        result = forward(*args, **kwargs)
        passed(module, at_end=True)
        return result

    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    entering = register_module_forward_pre_hook(lambda module, _: passed(module, at_end=False))
    leaving = register_module_forward_hook(lambda module, *_: passed(module, at_end=True))
    try:
        with intercept_calls(compiled, run_compiled):
            yield begin_micro_batch
    finally:
        entering.remove()
        leaving.remove()
