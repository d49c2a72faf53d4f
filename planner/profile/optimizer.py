"""Measure the cost of the optimizer for the parameters of one layer: state, transient memory and time of an update."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.device.clock import Clock, median_us
from planner.device.machine import CACHE_BYTES
from planner.device.meter import MemoryMeter
from planner.model.ghosts import storage_of
from planner.model.optimizers import WholeModelOptimizer
from planner.profile.units import LayerToMeasure

_MOST_NUMBERS = 2**22
"""Number of elements of a parameter above which updates are measured on a part and scaled, to limit memory."""


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """Memory that the optimizer needs for one layer, and time of its step for this layer."""

    state_bytes: int = 0
    peak_bytes: int = 0
    """Largest transient memory of an update, in bytes, in addition to state, parameters and gradients."""
    step_us: float = 0.0


ParameterCopies = Iterable[tuple[Tensor, Tensor]]
"""Pairs of a parameter and a copy of it."""


def measure_optimizer(
    module: nn.Module,
    whole: WholeModelOptimizer,
    *,
    layer_of_model: nn.Module | None = None,
    meter: MemoryMeter,
    clock: Clock,
    repeats: int,
    bytes_between_updates: int = 0,
    idle: Collection[str] = (),
) -> OptimizerCost:
    """Return memory and time of an optimizer's update, measured on copies of a layer's trained parameters.

    Args:
        module: The layer.
        whole: Optimizer of the whole model.
        layer_of_model: Layer for which `module` is measured; None for `module` itself. It has equal operators. Its
            optimizer options and the order of its parameters are used.
        meter: Meter of the device.
        clock: Clock of the device.
        repeats: Number of timed updates.
        bytes_between_updates: Bytes that training accesses between two updates of this layer. They evict the layer's
            parameters and optimizer state from the cache.
        idle: Names of parameters without gradients.
    """
    trained = trained_parameters(module)
    if not trained:
        return OptimizerCost()
    without = {id(p) for name, p in module.named_parameters() if name in idle}
    part = _share(trained)
    copies = [nn.Parameter(_part(p, part).detach().clone()) for p in trained]
    share = sum(p.numel() for p in trained) / max(1, sum(copy.numel() for copy in copies))
    for copy in (copy for p, copy in zip(trained, copies, strict=True) if id(p) not in without):
        # Gradients are not zeros, with which AdamW on a CPU takes twice as long and which training does not have.
        copy.grad = 1e-3 * torch.randn_like(copy)
    own = dict(zip(module.parameters(), (layer_of_model or module).parameters(), strict=True))
    optimizer = whole.build_for((own[p], copy) for p, copy in zip(trained, copies, strict=True))
    if all(copy.grad is None for copy in copies):
        return OptimizerCost(state_bytes=_states(optimizer, copies, trained))
    evicting = torch.empty(min(bytes_between_updates, CACHE_BYTES) // 4, device=copies[0].device)

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
        step_us=median_us([timed_us() for _ in range(repeats)]) * share,
    )


def has_additive_peaks(module: nn.Module, whole: WholeModelOptimizer, *, meter: MemoryMeter) -> bool:
    """Return True if an update's temporary memory grows with the number of parameters, not only with the largest one.

    Args:
        module: A layer.
        whole: Optimizer of the whole model.
        meter: Meter of the device.
    """
    twice, thrice = (_step_peak_bytes(trained_parameters(module), whole.build_for, meter, times) for times in (2, 3))
    return thrice > 1.25 * twice > 0


def trained_parameters(module: nn.Module, idle: Collection[str] = ()) -> list[nn.Parameter]:
    """Return the trained parameters of a module, except those with names in `idle`."""
    return [p for name, p in module.named_parameters() if p.requires_grad and name not in idle]


def first_of_same_cost(units: Sequence[LayerToMeasure], whole: WholeModelOptimizer) -> list[int]:
    """Return, for every layer, the index of the first layer with the same cost of an update."""
    # Updates of layers with equal operators may differ in cost, because optimizer groups may have different options.
    options = {id(p): group.cost_options for group in whole.groups() for p in group.parameters}
    first: dict[tuple[str | None, ...], int] = {}
    return [
        first.setdefault((unit.digest, *(options.get(id(p)) for p in unit.module.parameters())), n)
        for n, unit in enumerate(units)
    ]


def optimizer_boundary_peaks(
    layers: Sequence[Sequence[Tensor]], whole: WholeModelOptimizer, *, device: torch.device, meter: MemoryMeter
) -> list[int]:
    """Return, for each layer boundary, the peak temporary memory of updating a parameter before it and one after it.

    This memory is allocated while the optimizer updates a parameter of one layer directly after a parameter of the
    other layer. The optimizer may release a temporary tensor of the first parameter only during the second update.

    Args:
        layers: For each layer, the trained parameters that have gradients. Their values are not read.
        whole: Optimizer of the whole model, which determines the order of parameters.
        device: Device on which the optimizer runs.
        meter: Meter of the device.

    Returns:
        For each layer, the largest peak of two such updates at its boundary with the previous layer, in bytes; 0 if
        there are no such updates, as for the first layer.
    """
    groups, peaks = whole.groups(), dict[tuple[object, ...], int]()
    places = {id(p): (g, n) for g, group in enumerate(groups) for n, p in enumerate(group.parameters)}

    def peak(first: Tensor, second: Tensor) -> int:
        key = (groups[places[id(first)][0]].cost_options, *((p.shape, p.stride(), p.dtype) for p in (first, second)))
        if key not in peaks:
            peaks[key] = _peak_of_two(first, second, whole, device=device, meter=meter)
        return peaks[key]

    present = [{id(p): p for p in layer if id(p) in places} for layer in layers]
    joins = [_joins(previous, following, places) for previous, following in pairwise(present)]
    return [0, *(max((peak(*two) for two in pairs), default=0) for pairs in joins)]


def _joins(
    previous: Mapping[int, Tensor], following: Mapping[int, Tensor], order: Mapping[int, tuple[int, int]]
) -> list[tuple[Tensor, Tensor]]:
    both = {**previous, **following}
    return [
        (both[first], both[second])
        for first, second in pairwise(sorted(both, key=order.__getitem__))
        if order[first][0] == order[second][0]  # an optimizer finishes a group before the next
        and not any({first, second} <= layer.keys() for layer in (previous, following))
    ]


def _peak_of_two(
    first: Tensor, second: Tensor, whole: WholeModelOptimizer, *, device: torch.device, meter: MemoryMeter
) -> int:
    share = _share((first, second))
    copies = [nn.Parameter(torch.zeros_like(_part(p.detach(), share), device=device)) for p in (first, second)]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    optimizer = whole.build_for(zip((first, second), copies, strict=True))
    optimizer.step()
    return round(meter.measure(optimizer.step).peak_bytes / share)


def _states(optimizer: torch.optim.Optimizer, copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> int:
    return sum(
        _whole_bytes(state, copy, parameter)
        for copy, parameter in zip(copies, parameters, strict=True)
        for state in _state_of(optimizer, copy).values()
        if isinstance(state, Tensor)
    )


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """Return the state of a parameter. If `optimizer` wraps other optimizers, one of them may store the state."""
    inner = (part for part in tree_leaves(list(vars(optimizer).values())) if isinstance(part, torch.optim.Optimizer))
    return next((part.state[parameter] for part in chain((optimizer,), inner) if part.state.get(parameter)), {})


def _step_peak_bytes(
    trained: Sequence[nn.Parameter],
    build: Callable[[ParameterCopies], torch.optim.Optimizer],
    meter: MemoryMeter,
    times: int,
) -> int:
    part = _share(trained)
    copies = [nn.Parameter(_part(p, part).detach().clone()) for p in trained]
    if not copies:
        return 0
    optimizer = build(zip(trained, copies, strict=True))
    for group in optimizer.param_groups:
        # Every copy of the layer has the optimizer's order, so that the same parameters are neighbors in each number
        # of copies.
        group["params"] += [_one_more(first, optimizer) for _ in range(times - 1) for first in group["params"]]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return meter.measure(optimizer.step).peak_bytes


def _one_more(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> nn.Parameter:
    more = nn.Parameter(parameter.detach().clone())
    if parameter in optimizer.state:
        optimizer.state[more] = deepcopy(optimizer.state[parameter])
    return more


def _share(parameters: Sequence[Tensor]) -> float:
    return min(1.0, _MOST_NUMBERS / max((1, *(p.numel() for p in parameters))))


def _part(parameter: Tensor, share: float) -> Tensor:
    return parameter[: max(1, int(share * len(parameter)))] if parameter.dim() else parameter


def _whole_bytes(state: Tensor, part: Tensor, parameter: Tensor) -> int:
    size = storage_of(state).nbytes()
    by_row = state.dim() > 0 and len(state) == len(part) > 0
    return size * len(parameter) // len(part) if by_row else size
