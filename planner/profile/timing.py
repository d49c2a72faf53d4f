"""Measure the times of forward and backward of layers at every micro-batch size.

The backward is timed as a whole, and also split into an input-gradient pass and a weight-gradient pass.

All layers are timed once, then all a second time, and so on. If the machine slows down for a while, this affects all
layers alike. Between two runs of a layer, other layers replace its parameters in the cache, as in training.
"""

import gc
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle, filterfalse, islice

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from planner.device.clock import Clock, median_us
from planner.device.kind import DeviceKind
from planner.device.kinds import kind_of
from planner.model.batch_norm import BatchStatistics, defer_batch_norms
from planner.model.chain import Chain
from planner.model.split_backward import SplitBackward
from planner.profile.passes import (
    NoteEntry,
    SplitTimer,
    UnsplitBackwardTimer,
    fill_missing_gradients,
    is_large,
    time_neighbors,
)
from planner.profile.records import LayerRecords
from planner.profile.task import ProfilingTask
from planner.profile.units import LayerKey, LayerToMeasure, MeasurementInput, TimeSamples

_WARM_UPS = 2
"""Number of untimed passes, in which caches fill and libraries choose their kernels."""

_BLOCK = 5
"""Number of repeats between two checks whether the repeats suffice."""

_TOGETHER_US = 20_000.0
"""Longest time of layers that are timed together on a CPU, forward and backward, in microseconds."""

_TOGETHER_ON_GPU_US = 60_000.0
"""Longest time of layers that are timed together on a device with its own memory, in microseconds."""

_TOGETHER = range(3, 9)
"""Possible numbers of layers that are timed together."""

_STRETCH_BYTES = 2**28
"""Largest number of bytes that layers timed in one pass keep for backward.

Caches do not hold more, so timing more layers in one pass would not make the content of caches more realistic."""

_OVERHEAD_US = 100.0
"""Lower bound of the executor's time per micro-batch and stage, in microseconds.

`time_uncertainty` adds it to the time of each layer, so that short layers need fewer repeats."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times of one layer at one micro-batch size."""

    forward_us: float
    backward_us: float
    spread: float
    """Half-width of the 95 % confidence interval of the mean of forward + backward, divided by that mean."""


def measure_times(
    task: ProfilingTask,
    records: LayerRecords,
    *,
    statistics: BatchStatistics,
    clock: Clock,
    needs_repeats: Callable[[], bool],
    progress: Callable[[Sequence[LayerKey]], Iterator[LayerKey]],
) -> None:
    """Time all layers repeatedly, and add the times to the measurements of the task.

    Args:
        task: Profiling task, with the minimum number of repeats and any times of an interrupted run.
        records: Layers to time, with their inputs and memory.
        statistics: Collector to which batch normalizations add their statistics, as in training.
        clock: Clock of the device.
        needs_repeats: Function that returns True while further repeats are needed.
        progress: Function that yields the given keys one by one, and reports the progress before each key.
    """
    units, inputs, repeats = records.units, records.inputs, task.options.repeats
    samples, split_samples = task.measurements.samples, task.measurements.split_samples
    kept_bytes = {
        key: detail.internal_bytes + sum(tensor.bytes for tensor in (*detail.inputs, *detail.outputs))
        for key, detail in task.measurements.memory.items()
    }
    # Layers with equal operators take turns. If only one of them ran, its parameters would stay in the cache.
    equal = {digest: equal_layers(units, digest) for digest, _ in inputs}
    # Gradients are allocated before anything runs. Between transient tensors, they would fragment the memory.
    for unit in filterfalse(is_large, (units[n] for n in chain.from_iterable(equal.values()))):
        fill_missing_gradients(unit)
    turns: dict[LayerKey, Iterator[tuple[LayerToMeasure, ...]]] = {
        key: cycle([(units[n],) for n in equal[key[0]]]) for key in inputs
    }
    split = SplitBackward()
    with _no_collection(), units[0].weight_cast_cache(), split.weight_cast_cache():
        whole_timer = UnsplitBackwardTimer(clock=clock, statistics=statistics, note_entry=_entry_recorder(task, inputs))
        split_timer = SplitTimer(clock=clock, statistics=statistics, split=split)

        def add_to(
            times: TimeSamples, timer: UnsplitBackwardTimer, keys: Sequence[LayerKey], steps: Iterator[LayerKey]
        ) -> None:
            for stretch in group_layers_to_time(keys, kept_bytes):
                turn = {key: next(turns[key]) for key in islice(steps, len(stretch))}
                layers = [(unit, inputs[key]) for key, timed in turn.items() for unit in timed]
                times_us = iter(time_neighbors(timer, layers))
                for key, timed in turn.items():
                    times[key].append(_times_of_one(timed, list(islice(times_us, len(timed)))))
            next(steps, None)  # counts the last measurement as done

        warm_up: TimeSamples = defaultdict(list)
        for timer in (whole_timer, split_timer):
            add_to(warm_up, timer, list(inputs) * _WARM_UPS, iter(list(inputs) * _WARM_UPS))
        for key, kept in kept_bytes.items():
            number = _number_together(kind_of(units[0].device), sum(warm_up[key][-1]), kept)
            if together := group_equal_layers(task.chain, units, equal[key[0]], number):
                turns[key] = zip(cycle(together), cycle([units[n] for n in reversed(equal[key[0]])]), strict=False)
                kept_bytes[key] = kept * (1 + together[0].repeats)
        # Whole and split backwards take turns, so that a slowdown of the machine affects both alike.
        while short := [key for key in inputs if min(len(samples[key]), len(split_samples[key])) < repeats]:
            add_to(samples, whole_timer, short, progress(short))
            add_to(split_samples, split_timer, short, progress(short))
        while needs_repeats():
            gc.collect()
            again = list(inputs) * _BLOCK
            add_to(samples, whole_timer, again, progress(again))
            add_to(split_samples, split_timer, again, progress(again))


def _entry_recorder(task: ProfilingTask, inputs: Mapping[LayerKey, MeasurementInput]) -> NoteEntry:
    sizes = {id(received): size for (_, size), received in inputs.items()}

    def note_entry(unit: LayerToMeasure, received: MeasurementInput, entry_us: float) -> None:
        task.measurements.entries_us[unit.name, sizes[id(received)]].append(entry_us)

    return note_entry


def group_layers_to_time(keys: Sequence[LayerKey], kept_bytes: Mapping[LayerKey, int]) -> Iterator[list[LayerKey]]:
    """Divide the keys into lists of layers to time in one pass: successive keys with equal micro-batch size.

    The layers of a list keep at most `_STRETCH_BYTES` for backward, unless the list has only one layer.
    """
    stretch: dict[LayerKey, None] = {}
    kept = size = 0
    for key in keys:
        kept += kept_bytes[key]
        if stretch and (kept > _STRETCH_BYTES or key in stretch or key[1] != size):
            yield list(stretch)
            stretch, kept = {}, kept_bytes[key]
        stretch[key], size = None, key[1]
    if stretch:
        yield list(stretch)


def median_times(samples: Sequence[tuple[float, float]]) -> LayerTimes:
    """Return the median forward and backward time, and their spread, of at least 2 repeats."""
    both = [sum(sample) for sample in samples]
    mean = statistics.fmean(both)
    half_width = 1.96 * statistics.stdev(both) / len(both) ** 0.5
    forward_us, backward_us = (median_us(times) for times in zip(*samples, strict=True))
    return LayerTimes(forward_us=forward_us, backward_us=backward_us, spread=half_width / mean if mean else 0.0)


def round_ratios(samples: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of the times of all rounds, divided by their median.

    A round runs every layer once with every micro-batch size. Its time varies if the machine is slower for some
    seconds, for example because other virtual machines on its host are busy. `LayerTimes.spread` does not show this: it
    is the error of a mean of independent repeats.

    Args:
        samples: For every layer and micro-batch size, the repeats (forward, backward), in the order of the rounds.
    """
    # From the last round to the first: an interrupted profile has more repeats of some layers, at the beginning.
    rounds_us = [sum(map(sum, repeats)) for repeats in zip(*(each[::-1] for each in samples), strict=False)]
    low_us, median, high_us = np.percentile(rounds_us, (10, 50, 90)).tolist()
    return (round(low_us / median, 3), round(high_us / median, 3)) if median else (1.0, 1.0)


def layer_entry_times_us(
    names: Sequence[str], size: int, entries_us: Mapping[tuple[str, int], Sequence[float]]
) -> list[float]:
    """Return the entry time of each layer (`LayerProfile.entry_us`), from repeated measurements of some layers.

    The entry time of a layer is the time from the start of a stage's forward to the start of the layer, if the layer is
    the first of its stage. Only some of several equal layers are measured. The entry time of any other layer is
    interpolated between the nearest measured layers.

    Args:
        names: Name of every layer.
        size: Micro-batch size.
        entries_us: Repeated measurements, for names of layers and micro-batch sizes.
    """
    medians = {n: median_us(entries_us[name, size]) for n, name in enumerate(names) if (name, size) in entries_us}
    return np.interp(range(len(names)), list(medians), list(medians.values())).tolist()


def time_uncertainty(chain: Sequence[str], samples: Mapping[LayerKey, Sequence[tuple[float, float]]]) -> float:
    """Return the half-width of the 95 % confidence interval of the time of all layers, as a fraction of this time.

    The result is for the least certain micro-batch size. Layers with equal digests share one error, because they are
    measured as one layer.

    Args:
        chain: Digest of every layer.
        samples: For every digest and micro-batch size, at least 2 repeats (forward, backward).
    """
    counts, shares = Counter(chain), []
    for size in {size for _, size in samples}:
        times = [(count, median_times(samples[digest, size])) for digest, count in counts.items()]
        widths = [count * (t.forward_us + t.backward_us) * t.spread for count, t in times]
        total_us = sum(count * (t.forward_us + t.backward_us + _OVERHEAD_US) for count, t in times)
        shares.append(math.hypot(*widths) / total_us)
    return max(shares)


def measured_split_times(samples: Sequence[tuple[float, float]], whole: LayerTimes) -> tuple[float, float]:
    """Return the times of passes I (input gradients) and W (weight gradients), in microseconds.

    The forward before a split backward takes longer than that before a whole one. The difference counts as time of I.

    Args:
        samples: Repeats (forward plus I, W), as `SplitTimer` measures them.
        whole: Times of the same layer with a whole backward.
    """
    if not whole.backward_us:
        return 0.0, 0.0
    with_forward_us, weight_us = (median_us(each) for each in zip(*samples, strict=True))
    return max(0.0, with_forward_us - whole.forward_us), weight_us


def equal_layers(units: Sequence[LayerToMeasure], digest: str) -> list[int]:
    """Return the indices of the layers that are timed, in turn, to measure the time of this digest.

    The list ends when the parameters of its layers exceed `DeviceKind.min_bytes_of_timed_layers`.
    """
    equal = [n for n, unit in enumerate(units) if unit.digest == digest]
    unit = units[equal[0]]
    most_bytes = kind_of(unit.device).min_bytes_of_timed_layers()
    return equal[: 1 + most_bytes // unit.parameter_bytes] if unit.parameter_bytes else equal[: _TOGETHER[-1]]


def group_equal_layers(
    layers: Chain, units: Sequence[LayerToMeasure], equal_indices: Sequence[int], group_size: int
) -> list[LayerToMeasure]:
    """Return groups of consecutive equal layers, each group as one module that is timed as a whole.

    All groups have the same number of layers. The result is empty if this number is less than the minimum in
    `_TOGETHER`.

    A layer that is timed alone takes longer than in the model, because the host's caches do not contain its code, and a
    GPU waits for the first launch. A block of a small GPT-2 took 0.62 ms alone and 0.43 ms after another block. The
    time of a short layer is therefore computed from the times of a group and of one layer.

    Args:
        layers: Chain of all layers.
        units: All layers of the chain, in order, with one entry per layer.
        equal_indices: Indices of layers with equal operators, in ascending order.
        group_size: Desired number of layers of a group. The actual number is limited by the maximum in `_TOGETHER` and
            by the largest number of consecutive equal layers.
    """
    runs: list[list[int]] = []
    for n in equal_indices:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    group_size = min(group_size, _TOGETHER[-1], max(map(len, runs)))
    if group_size not in _TOGETHER:
        return []
    firsts = [n for run in runs for n in run[: len(run) - group_size + 1 : group_size]]
    return [replace(units[n], module=layers.stage(n, n + group_size), repeats=group_size) for n in firsts]


def _number_together(kind: DeviceKind, layer_us: float, kept_bytes: int) -> int:
    most_us = _TOGETHER_ON_GPU_US if kind.has_own_memory else _TOGETHER_US
    most_bytes = max(_STRETCH_BYTES, 4 * kind.min_bytes_of_timed_layers())
    return int(min(most_us / max(1.0, layer_us), most_bytes / max(1, kept_bytes)))


def _times_of_one(timed: Sequence[LayerToMeasure], times_us: Sequence[tuple[float, float]]) -> tuple[float, float]:
    if len(timed) == 1:
        return times_us[0]
    number = timed[0].repeats
    # At least half of the mean, because `one` may have been measured while the machine was busy.
    first_us, second_us = (
        max((several - one) / (number - 1), several / number / 2) for several, one in zip(*times_us, strict=True)
    )
    return first_us, second_us


def statistics_update_us(unit: LayerToMeasure, received: MeasurementInput, *, clock: Clock, repeats: int) -> float:
    """Return the time in microseconds to update a layer's running statistics of batch normalization once.

    Args:
        unit: The layer.
        received: Input of the layer, of any micro-batch size.
        clock: Clock of the device.
        repeats: Number of timed updates.
    """
    if not any(isinstance(module, _BatchNorm) for module in unit.module.modules()):
        return 0.0
    times = []
    with defer_batch_norms(unit.module) as statistics, torch.no_grad():
        for _ in range(repeats):
            with statistics.collecting():
                unit.run(received.non_leaf_copies(), received)
            times.append(clock.time_us(statistics.update_running_statistics))
    return median_us(times)


@contextmanager
def _no_collection() -> Iterator[None]:
    # A garbage collection would count as time of the layer that is running.
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
