"""Convert the measurements to a profile of every layer. Layers with equal operators share their measurements."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planner.core.cost.costs import saved_bytes
from planner.core.values.profile import LayerProfile, MemoryDetail, TiedGroup
from planner.model.chain import Layer, shared_parameters, tied_parameters
from planner.model.state import batch_norm_statistics_bytes
from planner.profile.memory import view_gradient_names
from planner.profile.optimizer import OptimizerCost
from planner.profile.records import LayerRecords
from planner.profile.task import ProfilingTask
from planner.profile.timing import LayerTimes, layer_entry_times_us
from planner.profile.units import LayerKey


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Measurements of layers. Most are stored by layer digest, because equal layers share measurements."""

    records: LayerRecords
    casts_bytes: Mapping[str, int]
    """For each layer digest, the bytes of autocast's weight cache."""
    rewritten_bytes: Mapping[str, int]
    """For each layer digest, the bytes of state that a forward of the layer writes."""
    idle: Mapping[str, Collection[str]]
    """For each layer digest, names of parameters that never get a gradient (`parameters_without_gradients`)."""
    optimizer: Sequence[OptimizerCost]
    """Cost of the optimizer for each layer; it may differ between layers with equal digests."""
    optimizer_boundary_peaks: Sequence[int]
    """For each layer, the temporary bytes while a parameter of the previous layer and one of this layer are updated."""
    flops: Mapping[str, int]
    """For each layer digest, the floating-point operations of the layer's forward at the smallest micro-batch size."""
    times: Mapping[LayerKey, LayerTimes]
    half_times_us: Mapping[LayerKey, tuple[float, float]] = field(default_factory=dict)
    """Times of the input-gradient and the weight-gradient pass, in microseconds; empty if these were not timed."""


@dataclass(frozen=True, kw_only=True)
class BackendResult:
    """Costs of a model's layers, found by a backend."""

    sizes: tuple[int, ...]
    """Micro-batch sizes that fit in memory."""
    optimizer_peaks_add: bool
    """True if the temporary memory of an update grows with the number of parameters, not only with the largest one."""
    layers: tuple[LayerProfile, ...]
    round_ratios: tuple[float, float] = (1.0, 1.0)
    """10th and 90th percentile of the times of profiling rounds over all layers, divided by their median."""


def layer_profiles(task: ProfilingTask, costs: MeasuredCosts) -> tuple[LayerProfile, ...]:
    """Return the profile of every layer, in order."""
    records, chain = costs.records, task.chain
    memory = task.measurements.memory
    saved = [saved_bytes([memory[unit.digest, size] for unit in records.units]) for size in records.sizes]
    tied = tied_parameters(chain.layers)
    views = _view_gradients(chain.layers, records, tied)
    names, entries_us = [layer.name for layer in chain.layers], task.measurements.entries_us
    # All times are 0 on GPUs.
    entries = [
        layer_entry_times_us(names, size, entries_us) for size in records.sizes if any(map(any, entries_us.values()))
    ]
    return tuple(
        _layer_profile(
            task,
            n,
            costs,
            entry_us=tuple(round(of_size[n], 1) for of_size in entries),
            saved=tuple(of_size[n] for of_size in saved),
            tied=tied,
            views=views,
        )
        for n in range(len(chain.layers))
    )


def _layer_profile(
    task: ProfilingTask,
    n: int,
    costs: MeasuredCosts,
    *,
    entry_us: tuple[float, ...],
    saved: tuple[int, ...],
    tied: Mapping[str, tuple[str, ...]],
    views: Mapping[str, Collection[str]],
) -> LayerProfile:
    layer, digest, sizes = task.chain.layers[n], costs.records.units[n].digest, costs.records.sizes
    times = [costs.times[digest, size] for size in sizes]
    half_times = [costs.half_times_us[digest, size] for size in sizes if (digest, size) in costs.half_times_us]
    split_memory = task.measurements.split_memory
    split = tuple(split_memory[digest, size] for size in sizes if (digest, size) in split_memory)
    details = tuple(task.measurements.memory[digest, size] for size in sizes)
    optimizer = costs.optimizer[n]
    sharers, tied_bytes = _ties(layer, tied)
    names = costs.records.translate_parameter_names(n, costs.idle[digest])
    idle_bytes = sum(p.nbytes for name, p in layer.module.named_parameters() if name in names)
    return LayerProfile(
        name=layer.name,
        digest=digest,
        modules=task.chain.modules(n),
        parameter_bytes=sum(p.nbytes for p in layer.module.parameters()),
        gradient_bytes=sum(p.nbytes for p in layer.module.parameters() if p.requires_grad) - idle_bytes,
        idle_bytes=idle_bytes,
        optimizer_bytes=optimizer.state_bytes,
        buffer_bytes=task.buffer_bytes[layer.name] + batch_norm_statistics_bytes(layer.module),
        cast_bytes=costs.casts_bytes[digest],
        rewritten_bytes=costs.rewritten_bytes[digest],
        tied=sharers,
        tied_bytes=tied_bytes,
        tied_groups=_tied_groups(task.chain.layers, n, tied_bytes),
        tied_view_bytes=_tied_view_bytes(
            layer, tied, costs.records.translate_parameter_names(n, views.get(digest, ()))
        ),
        optimizer_us=round(optimizer.step_us, 1),
        optimizer_peak_bytes=optimizer.peak_bytes,
        optimizer_boundary_peak_bytes=costs.optimizer_boundary_peaks[n],
        forward_us=tuple(round(t.forward_us, 1) for t in times),
        backward_us=tuple(round(t.backward_us, 1) for t in times),
        entry_us=entry_us,
        backward_input_us=tuple(round(input_us, 1) for input_us, _ in half_times),
        backward_weight_us=tuple(round(weight_us, 1) for _, weight_us in half_times),
        spread=tuple(round(t.spread, 4) for t in times),
        output_bytes=tuple(sum(t.bytes for t in d.outputs) for d in details),
        saved_bytes=saved,
        weight_held_bytes=tuple(one.held_bytes for one in split),
        forward_peak_bytes=tuple(max(0, d.forward_peak_bytes - d.internal_bytes - _created_bytes(d)) for d in details),
        backward_peak_bytes=tuple(max(0, d.backward_peak_bytes - d.internal_bytes) for d in details),
        forward_flops=tuple(costs.flops[digest] * size // sizes[0] for size in sizes),
        detail=details,
        split=split,
    )


def _ties(layer: Layer, tied: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], int]:
    shared = {name: parameter for name, parameter in layer.parameters_by_name().items() if name in tied}
    sharers = [other for name in shared for other in tied[name] if other != layer.name]
    return tuple(dict.fromkeys(sharers)), sum(parameter.nbytes for parameter in shared.values())


def _tied_groups(layers: Sequence[Layer], n: int, tied_bytes: int) -> tuple[TiedGroup, ...]:
    parameters, sizes = layers[n].parameters_by_name(), dict[tuple[str, ...], int]()
    for owners in shared_parameters(layers):
        earlier = tuple(layers[place].name for place in sorted({place for place, _ in owners}) if place < n)
        own = [name for place, name in owners if place == n]
        if own and earlier:
            sizes[earlier] = sizes.get(earlier, 0) + parameters[own[0]].nbytes
    if len(sizes) == 1 and tied_bytes in sizes.values():
        return ()
    return tuple(TiedGroup(layers=earlier, bytes=size) for earlier, size in sizes.items())


def _view_gradients(
    layers: Sequence[Layer], records: LayerRecords, tied: Mapping[str, tuple[str, ...]]
) -> dict[str, frozenset[str]]:
    """Return names of parameters whose gradient is a view, by layer digest; only for layers with shared parameters."""
    shares = {unit.digest for unit, layer in zip(records.units, layers, strict=True) if _ties(layer, tied)[1]}
    return {
        digest: view_gradient_names(unit, records.inputs[digest, records.sizes[0]])
        for digest, unit in records.distinct.items()
        if digest in shares
    }


def _tied_view_bytes(layer: Layer, tied: Mapping[str, tuple[str, ...]], views: Collection[str]) -> int:
    pairs = zip(layer.parameters_by_name(), layer.module.named_parameters(), strict=True)
    return max((parameter.nbytes for full, (name, parameter) in pairs if full in tied and name in views), default=0)


def _created_bytes(detail: MemoryDetail) -> int:
    return sum(tensor.bytes for tensor in detail.outputs if tensor.alias < 0)
