"""The reference of the equivalence check: the user's model in a plain training loop, uncut and unwrapped.

    for step in range(steps):
        for each micro-batch:                    # the same ones that the pipeline's stages get
            loss = loss_fn(model(inputs), targets) * weight
            loss.backward()
        optimizer.step()

Nothing of the executor takes part. Two things are arranged so that the loop can be compared with a pipeline:

- Every layer draws random numbers from a seed of its own (`planner.model.seeding`), as layers of a pipeline do. Torch's
  global module hooks set this seed. The model's own hooks are not modified.
- Running statistics of batch normalization are those of the whole mini-batch (docs/cost-model.md), computed here from
  the layers' inputs.

After the gradients and after the optimizer's step, the state is written to a file.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from planner.core.errors import ModelError
from planner.core.values.units import counted
from planner.model.autocast import autocast_dtype
from planner.model.calling import arguments_of
from planner.model.label_counts import label_count
from planner.model.lean import build_lean, fill
from planner.model.load import Batch, LoadedModel
from planner.model.precision import converted
from planner.model.seeding import layer_seed, seed_host, seed_process
from planner.model.shortened import Skipped, without_modules
from planner.model.state import NUMBERS

_LOSS_SCALE = 2.0**16
"""Scale of the loss in the first step under `fp16-mixed`; it is halved after an overflow."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_LIBRARIES = ("torch", "transformers", "timm", "planner")
"""Packages whose module-level numbers are no part of a model."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LayerStart:
    """Where in a forward a layer begins: at the start or the end of one call of a module."""

    path: str
    call: int
    """Number of the call among those of this module in one forward, from 1."""
    at_end: bool


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """How the plain loop trains."""

    seed: int
    steps: int
    micro_batches: int
    micro_batch_size: int
    starts: tuple[LayerStart | None, ...]
    """By layer from the second on, where it begins; None where no call of a module begins or ends there."""
    updates: bool = True
    """Whether there is an optimizer; else only the gradients of one step are computed."""
    skipped: tuple[Skipped, ...] = ()
    """Layers that are left out."""
    lean: bool = False
    """Whether parameters get random values of their own, so that only those of layers that run take memory."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a training loop has at one moment."""

    loss: float
    tensors: Mapping[str, Tensor | None]
    """By what it is and its name, as in `gradient:head.weight`; None for a gradient that did not come about."""
    numbers: Mapping[str, float]
    """Numbers that modules hold in attributes, by path; the model file's, by module and name."""
    groups: Mapping[str, Mapping[str, float]]
    """By parameter, the options of its group in the optimizer."""

    def sampled(self) -> "State":
        """Return this state with each large tensor replaced by a sample, which suffices to verify an update."""
        return replace(self, tensors={n: None if t is None else sample_of(t) for n, t in self.tensors.items()})

    def save(self, path: Path) -> None:
        """Write it to a file."""
        tensors = {name: None if tensor is None else tensor.detach() for name, tensor in self.tensors.items()}
        unfinished = path.with_suffix(".unfinished")
        content = {"loss": self.loss, "tensors": tensors, "numbers": dict(self.numbers), "groups": dict(self.groups)}
        torch.save(content, unfinished)
        unfinished.replace(path)  # a reader finds all of it or nothing

    @classmethod
    def load(cls, path: Path) -> "State":
        """Read it from a file, whose tensors stay there until they are used."""
        return cls(**torch.load(path, mmap=True, weights_only=True))


def train_reference(
    loaded: LoadedModel, options: ReferenceOptions, folder: Path | None, shake: "Shake | None" = None
) -> list[float]:
    """Train the model in a plain loop and write its states to `folder`.

    The files are `initial`, and for every step `gradients-N` and `updated-N`.

    Args:
        loaded: The model.
        options: How to train.
        folder: Where to write; None writes nothing.
        shake: Changes the initial parameters a little, to see what the model makes of rounding errors.

    Returns:
        The loss of every step.
    """

    def write(name: str, state: Callable[[], State]) -> None:
        if folder is not None:
            state().save(folder / name)

    seed_process(options.seed)
    model = _built(loaded, options)
    if shake is not None:
        shake(model)
    losses: list[float] = []
    write("initial", partial(_initial, loaded, model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = loaded.build_optimizer(model.parameters()) if options.updates else None
    scale = _LOSS_SCALE if loaded.precision == "fp16-mixed" else 1.0
    with _seeded_layers(model, options) as begin_micro_batch:
        for step in range(options.steps):
            with _whole_mini_batch_statistics(model):
                batches = _micro_batches(mini_batch(loaded, options, step), options)
                begin = partial(begin_micro_batch, step)
                loss = _accumulate(model, loaded, batches, scale=scale, begin_micro_batch=begin)
            if scale == 1.0 and not math.isfinite(loss):
                with_samples = f"with micro-batches of {counted(options.micro_batch_size, 'sample')}"
                hint = "check `loss_fn` and the learning rate; deviations over the batch need two samples or more"
                raise ModelError(f"the loss is {loss} in step {step} of a plain loop, {with_samples}", hint=hint)
            scale = _unscale(trained, scale)
            losses.append(loss)
            write(f"gradients-{step}", partial(_after_backward, loaded, model, loss))
            if optimizer is None:
                break
            optimizer.step()
            write(f"updated-{step}", partial(_after_update, model, loss, optimizer))
            optimizer.zero_grad()
    return losses


Shake = Callable[[nn.Module], None]


def sample_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in one dimension; of a large one a million or two, evenly spread.

    The sample of a sample is the sample.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() >> 20)].clone()


def mini_batch(loaded: LoadedModel, options: ReferenceOptions, step: int) -> Batch:
    """Return the example mini-batch of a step, which depends on seed and step alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed * 1_000_003 + step)
        return loaded.example_batch(options.micro_batches * options.micro_batch_size)


def module_numbers(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the numbers that modules hold in plain attributes, by path and name."""
    return {
        f"{path}.{name}": value
        for path, module in modules.items()
        for name, value in vars(module).items()
        if type(value) in NUMBERS and name not in _OF_EVERY_MODULE
    }


def file_numbers(loaded: LoadedModel, model: nn.Module) -> dict[str, float]:
    """Return the module-level numbers of the files that the model's classes and its loss are written in."""
    names = {type(module).__module__ for module in model.modules()} | {getattr(loaded.loss_fn, "__module__", "")}
    own = sorted(name for name in names if name in sys.modules and not name.startswith(_LIBRARIES))
    return {
        f"{name}:{variable}": value
        for name in own
        for variable, value in vars(sys.modules[name]).items()
        if type(value) in NUMBERS
    }


def _built(loaded: LoadedModel, options: ReferenceOptions) -> nn.Module:
    if not options.lean:
        return without_modules(converted(loaded.build(), loaded.precision), options.skipped)
    model = without_modules(converted(build_lean(loaded.build), loaded.precision), options.skipped)
    fill([model], model, _CPU)
    return model


def _accumulate(
    model: nn.Module,
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    scale: float,
    begin_micro_batch: Callable[[int], None],
) -> float:
    """Add up the gradients of a mini-batch, times `scale`; return its loss."""
    total = 0.0
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
            (loss * weight * scale).sum().backward()
    return total


def _has_gradient(model: nn.Module, loss: Tensor) -> bool:
    """Return True if there is something to train; raise `ModelError` if the loss does not lead to it."""
    if not loss.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the loss carries no gradient, so nothing would be trained", hint="is something detached?")
    return loss.requires_grad


def _micro_batches(batch: Batch, options: ReferenceOptions) -> list[Batch]:
    size = options.micro_batch_size
    return [
        Batch(*tree_map_only(Tensor, partial(_rows, first=number * size, end=(number + 1) * size), tuple(batch)))
        for number in range(options.micro_batches)
    ]


def _rows(tensor: Tensor, first: int, end: int) -> Tensor:
    return tensor[first:end]


def _weights(loaded: LoadedModel, batches: Sequence[Batch]) -> list[float]:
    """Return the weight of each micro-batch's loss in the mini-batch's loss."""
    if loaded.loss_count is not None:
        counts = [float(loaded.loss_count(batch.targets)) for batch in batches]
    elif loaded.counted_labels and all(isinstance(b.inputs, dict) and "labels" in b.inputs for b in batches):
        counts = [label_count(batch.inputs, loaded.counted_labels) for batch in batches]
    else:
        counts = [1.0] * len(batches)
    return [count / sum(counts) if sum(counts) else 0.0 for count in counts]


def _unscale(trained: Sequence[nn.Parameter], scale: float) -> float:
    """Divide gradients by the loss scale, or drop them all where one overflowed; return the next step's scale."""
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
    """Seed the generators at the start of every layer.

    Yields a function that must be called with the step and the micro-batch before each micro-batch.
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
        calls[id(module), at_end] += 1
        layer = layer_at.get((id(module), calls[id(module), at_end], at_end))
        if layer is not None:
            plant(layer)

    def begin_micro_batch(step: int, micro_batch: int) -> None:
        now[:] = step, micro_batch
        calls.clear()
        plant(0)

    def entered(module: nn.Module, _args: Any) -> None:
        passed(module, at_end=False)

    def left(module: nn.Module, _args: Any, _output: Any) -> None:
        passed(module, at_end=True)

    entering, leaving = register_module_forward_pre_hook(entered), register_module_forward_hook(left)
    try:
        yield begin_micro_batch
    finally:
        entering.remove()
        leaving.remove()


@contextmanager
def _whole_mini_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Make the running statistics of batch normalization those of the whole mini-batch.

    Inside the `with` block, each micro-batch updates the statistics. On exit, they are restored and updated once with
    the mean and the unbiased variance of all inputs. A layer that is called several times in a forward is updated once
    for each of these calls.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None]
    before = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}
    seen: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in norms}
    forwards: list[None] = []

    def see(norm: Any, args: Any) -> None:
        if args:  # by channel, in float64
            values = args[0].detach().double().movedim(1, 0).flatten(1)
            sums = torch.stack([torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.square().sum(1)])
            seen[norm].append(sums)

    def count(_model: Any, _args: Any) -> None:
        forwards.append(None)

    hooks = [norm.register_forward_pre_hook(see) for norm in norms]
    hooks.append(model.register_forward_pre_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for norm in norms:
        for name, buffer in norm.named_buffers():
            buffer.copy_(before[norm][name])
        num_calls = len(seen[norm]) // max(1, len(forwards))
        for call in range(num_calls):
            _update(norm, torch.stack(seen[norm][call::num_calls]).sum(0))


def _update(norm: _BatchNorm, sums: Tensor) -> None:
    """Update running statistics with the count, sum and sum of squares of every channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    count, mean = sums[0], sums[1] / sums[0]
    variance = (sums[2] - count * mean.square()) / (count - 1)
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked += 1
        momentum = 1 / float(norm.num_batches_tracked) if momentum is None else momentum
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.lerp_(new.to(running.dtype), 0.0 if momentum is None else momentum)


def _initial(loaded: LoadedModel, model: nn.Module) -> State:
    """Return parameters, buffers and numbers."""
    tensors = {f"parameter:{name}": p for name, p in model.named_parameters(remove_duplicate=False)}
    return State(loss=0.0, tensors={**tensors, **_buffers(model)}, numbers=_numbers(loaded, model), groups={})


def _after_backward(loaded: LoadedModel, model: nn.Module, loss: float) -> State:
    """Return gradients, buffers and numbers."""
    gradients = {f"gradient:{name}": p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return State(loss=loss, tensors={**gradients, **_buffers(model)}, numbers=_numbers(loaded, model), groups={})


def _after_update(model: nn.Module, loss: float, optimizer: torch.optim.Optimizer) -> State:
    """Return samples of parameters and of the optimizer's state."""
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors, groups = optimizer_state(optimizer, named)
    tensors |= {f"parameter:{name}": parameter for name, parameter in named.items()}
    return State(loss=loss, tensors=tensors, numbers={}, groups=groups).sampled()


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"buffer:{name}": buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


def _numbers(loaded: LoadedModel, model: nn.Module) -> dict[str, float]:
    return module_numbers(dict(model.named_modules())) | file_numbers(loaded, model)


def optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor | None], dict[str, dict[str, float]]]:
    """Return an optimizer's tensors and numbers by parameter and key, and the numbers of each parameter's group."""
    names: dict[int, list[str]] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), []).append(name)
    tensors: dict[str, Tensor | None] = {}
    groups: dict[str, dict[str, float]] = {}
    for group in optimizer.param_groups:
        options = {key: float(value) for key, value in group.items() if type(value) in NUMBERS}
        named_here = [(name, p) for p in group["params"] for name in names.get(id(p), ())]
        for name, parameter in named_here:
            groups[name] = options
            state = optimizer.state.get(parameter, {}).items()
            kept = {key: value for key, value in state if isinstance(value, Tensor | int | float)}
            tensors |= {f"optimizer:{name}:{key}": torch.as_tensor(value) for key, value in kept.items()}
    return tensors, groups
