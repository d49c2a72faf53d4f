"""Measure the cost of the optimizer's step for the parameters of one layer: state, transient bytes, time."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn

from planner.device.clock import Clock, typical_us
from planner.device.machine import CACHE_BYTES
from planner.device.meter import Meter
from planner.model.ghosts import storage_of
from planner.model.optimizers import ModelOptimizer

_MOST_NUMBERS = 2**22
"""Size limit of parameters that are measured whole: gradient, state and transients may take five times the memory."""


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """Cost of one layer per mini-batch."""

    state_bytes: int = 0
    peak_bytes: int = 0
    """Transient bytes above state, parameters and gradients."""
    step_us: float = 0.0


Copies = Iterable[tuple[Tensor, Tensor]]
"""Pairs of a parameter and a copy of it."""


def measure_optimizer(
    module: nn.Module,
    whole: ModelOptimizer,
    *,
    stands_for: nn.Module | None = None,
    meter: Meter,
    clock: Clock,
    repeats: int,
    between_bytes: int = 0,
    idle: Collection[str] = (),
) -> OptimizerCost:
    """Step an optimizer over copies of the module's trainable parameters; the first step makes the state.

    Args:
        module: The layer.
        whole: Optimizer of the whole model.
        stands_for: Equal module at another place of the model, whose parameters' groups and order the optimizer uses;
            by default `module`.
        meter: Meter of the device.
        clock: Clock of the device.
        repeats: Number of timed steps.
        between_bytes: Bytes that a training step accesses between two steps over this layer, and that evict its cache.
        idle: Names of parameters without gradients.

    Returns:
        The cost.
    """
    build = _in_place(whole, module, stands_for or module)
    trained = trained_parameters(module)
    if not trained:
        return OptimizerCost()
    without = {id(p) for name, p in module.named_parameters() if name in idle}
    part = _share(trained)
    copies = [nn.Parameter(_part(p, part).detach().clone()) for p in trained]
    share = sum(p.numel() for p in trained) / sum(copy.numel() for copy in copies)
    for copy in (copy for p, copy in zip(trained, copies, strict=True) if id(p) not in without):
        # Not zeros: a CPU's AdamW takes twice as long over them, and training does not have them.
        copy.grad = 1e-3 * torch.randn_like(copy)
    optimizer = build(zip(trained, copies, strict=True))
    if all(copy.grad is None for copy in copies):
        return OptimizerCost(state_bytes=_states(optimizer, copies, trained))
    evicting = torch.empty(min(between_bytes, CACHE_BYTES) // 4, device=copies[0].device)

    def timed_us() -> float:
        evicting.fill_(1.0)
        return clock.time_us(optimizer.step)

    optimizer.step()
    state_bytes = _states(optimizer, copies, trained)
    optimizer.step()
    peak_bytes = meter.measure(optimizer.step).peak_bytes
    return OptimizerCost(
        state_bytes=state_bytes,
        peak_bytes=round(peak_bytes * share),
        step_us=typical_us([timed_us() for _ in range(repeats)]) * share,
    )


def peaks_add(module: nn.Module, whole: ModelOptimizer, *, meter: Meter) -> bool:
    """Return True if the optimizer's transients grow with the number of parameters (`foreach`), not with the largest.

    Steps over two and over three copies of the layer's parameters are compared. A single copy shows less: the step of
    the next parameter may begin while a tensor of the previous one still exists.

    Args:
        module: A layer.
        whole: Optimizer of the whole model.
        meter: Meter of the device.
    """
    twice, thrice = (_step_peak_bytes(trained_parameters(module), whole.over, meter, times) for times in (2, 3))
    return thrice > 1.25 * twice > 0


def _in_place(
    whole: ModelOptimizer, module: nn.Module, stands_for: nn.Module
) -> Callable[[Copies], torch.optim.Optimizer]:
    """Return a builder of the optimizer over copies of the module's parameters, in the place of `stands_for`."""
    place = {id(p): at for p, at in zip(module.parameters(), stands_for.parameters(), strict=True)}
    return lambda copies: whole.over((place[id(p)], copy) for p, copy in copies)


def trained_parameters(module: nn.Module, idle: Collection[str] = ()) -> list[nn.Parameter]:
    """Return the trained parameters whose names are not in `idle`."""
    return [p for name, p in module.named_parameters() if p.requires_grad and name not in idle]


def first_of_same_cost(modules: Sequence[nn.Module], digests: Sequence[str], whole: ModelOptimizer) -> list[int]:
    """Return, for every layer, the number of the first layer with the same cost of a step.

    Layers of one digest differ if the optimizer has their parameters in groups with other options, or not at all.

    Args:
        modules: Module of every layer.
        digests: Digest of every layer.
        whole: Optimizer of the whole model.

    Returns:
        Indices of layers.
    """
    options = {id(p): group.cost_options for group in whole.groups() for p in group.parameters}
    first: dict[tuple[str | None, ...], int] = {}
    return [
        first.setdefault((digest, *(options.get(id(p)) for p in module.parameters())), n)
        for n, (module, digest) in enumerate(zip(modules, digests, strict=True))
    ]


def boundary_peaks(
    layers: Sequence[Sequence[Tensor]], whole: ModelOptimizer, *, device: torch.device, meter: Meter
) -> list[int]:
    """Return the transient bytes of a step as it moves to each layer from the previous one; 0 for the first.

    An optimizer that steps parameter by parameter, such as torch's Adam, may release the last tensor of one only in the
    step of the next. Two large parameters in a row then need more than either layer alone.

    Args:
        layers: Trained parameters of each layer that have gradients. Their values are not read.
        whole: Optimizer of the whole model, whose order of parameters counts.
        device: Device to step on.
        meter: Meter of that device.

    Returns:
        Bytes for each layer.
    """
    groups, found = whole.groups(), dict[tuple[object, ...], int]()
    places = {id(p): (g, n) for g, group in enumerate(groups) for n, p in enumerate(group.parameters)}

    def peak(first: Tensor, second: Tensor) -> int:
        key = (groups[places[id(first)][0]].cost_options, *((p.shape, p.stride(), p.dtype) for p in (first, second)))
        if key not in found:
            found[key] = _peak_of_two(first, second, whole, device=device, meter=meter)
        return found[key]

    present = [{id(p): p for p in layer if id(p) in places} for layer in layers]
    joins = [_joins(front, behind, places) for front, behind in pairwise(present)]
    return [0, *(max((peak(*two) for two in pairs), default=0) for pairs in joins)]


def _joins(
    front: Mapping[int, Tensor], behind: Mapping[int, Tensor], order: Mapping[int, tuple[int, int]]
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of parameters, one of each layer, that the optimizer steps one directly after the other."""
    both = {**front, **behind}
    return [
        (both[first], both[second])
        for first, second in pairwise(sorted(both, key=order.__getitem__))
        if order[first][0] == order[second][0]  # an optimizer steps its groups apart
        and not any({first, second} <= layer.keys() for layer in (front, behind))
    ]


def _peak_of_two(first: Tensor, second: Tensor, whole: ModelOptimizer, *, device: torch.device, meter: Meter) -> int:
    share = _share((first, second))
    copies = [nn.Parameter(torch.zeros_like(_part(p.detach(), share), device=device)) for p in (first, second)]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    optimizer = whole.over(zip((first, second), copies, strict=True))
    optimizer.step()
    return round(meter.measure(optimizer.step).peak_bytes / share)


def _states(optimizer: torch.optim.Optimizer, copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> int:
    return sum(
        _whole_bytes(state, copy, parameter)
        for copy, parameter in zip(copies, parameters, strict=True)
        for state in optimizer.state[copy].values()
        if isinstance(state, Tensor)
    )


def _step_peak_bytes(
    trained: Sequence[nn.Parameter], build: Callable[[Copies], torch.optim.Optimizer], meter: Meter, times: int
) -> int:
    part = _share(trained)
    copies = [nn.Parameter(_part(p, part).detach().clone()) for _ in range(times) for p in trained]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    if not copies:
        return 0
    optimizer = build(zip(trained, copies, strict=False))
    for first, more in zip(cycle(copies[: len(trained)]), copies[len(trained) :], strict=False):
        _add_like(optimizer, first, more)
    optimizer.step()
    return meter.measure(optimizer.step).peak_bytes


def _add_like(optimizer: torch.optim.Optimizer, first: Tensor, more: Tensor) -> None:
    """Add a parameter to the group of another one, with the same kind of state."""
    for group in optimizer.param_groups:
        if any(p is first for p in group["params"]):
            group["params"].append(more)
    if first in optimizer.state:
        optimizer.state[more] = deepcopy(optimizer.state[first])


def _share(parameters: Sequence[Tensor]) -> float:
    """Return the share of the rows of each parameter that is measured, equal for all: 1 if none is large."""
    return min(1.0, _MOST_NUMBERS / max((1, *(p.numel() for p in parameters))))


def _part(parameter: Tensor, share: float) -> Tensor:
    """Return the rows of a parameter that are measured."""
    return parameter[: _rows(parameter, share)] if parameter.dim() else parameter


def _rows(parameter: Tensor, share: float) -> int:
    return max(1, int(share * len(parameter))) if parameter.dim() else 1


def _whole_bytes(state: Tensor, part: Tensor, parameter: Tensor) -> int:
    """Return the bytes of the state for the whole parameter, from the state of the measured part."""
    size = storage_of(state).nbytes()
    by_row = state.dim() > 0 and len(state) == len(part)
    return size * len(parameter) // len(part) if by_row else size
