"""Time the forward and backward of every distinct layer at every micro-batch size, with the backward whole and split.

All layers are timed in turn, repeatedly, rather than each many times in a row. Then a machine that slows down for a
while slows all of them alike. And no layer finds data in a cache that would not be there in training. For the same
reason equal layers of a model take turns: one of them alone would keep its parameters in the cache.
"""

import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from planner.device.clock import Clock, typical_us
from planner.device.machine import CACHE_BYTES
from planner.model.batch_norm import BatchStatistics, deferring
from planner.model.split_backward import SplitBackward
from planner.profile.passes import IdleLayer, SplitTimer, WholeTimer, forward_of, give_gradients, in_a_row, is_large
from planner.profile.units import Key, Unit, UnitInput

_WARM_UPS = 2
"""Passes that fill caches and let libraries choose their kernels."""

_BLOCK = 5
"""Repeats between two checks of whether they suffice."""

_STRETCH_BYTES = 2**28
"""Saved bytes after which a row of layers ends: by then its first layers are no longer in a cache."""

_OVERHEAD_US = 100.0
"""Lower bound of an executor's time per micro-batch and stage; much faster layers need no exact time."""

Samples = dict[Key, list[tuple[float, float]]]
"""Pairs of times of every repeat, in microseconds: forward and backward; or forward with I, and W."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Times of one layer at one micro-batch size."""

    forward_us: float
    backward_us: float
    spread: float
    """Relative half-width of the 95 % interval of forward + backward (of the mean over repeats)."""


def measure_times(
    units: Sequence[Unit],
    inputs: Mapping[Key, UnitInput],
    samples: Samples,
    halves: Samples,
    *,
    statistics: BatchStatistics,
    clock: Clock,
    repeats: int,
    doubtful: Callable[[], bool],
    progress: Callable[[Sequence[Key]], Iterator[Key]],
    kept_bytes: Mapping[Key, int],
) -> None:
    """Add repeats to `samples` and `halves`; gradients exist, as from the second micro-batch on.

    Args:
        units: Units of all layers.
        inputs: Their inputs, one for each digest and micro-batch size.
        samples: Earlier times of forward and backward; an entry for every key of `inputs`.
        halves: Earlier times of forward with I, and of W; the same entries.
        statistics: Statistics of the layers' batch normalizations, which are collected as in training.
        clock: The device's clock.
        repeats: Minimum of timed passes over all layers, 2 or more.
        doubtful: Returns True if further repeats are needed after these.
        progress: Yields the measurements one by one, and announces them.
        kept_bytes: Bytes that each keeps from its forward to its backward.
    """
    equal = {digest: enough_to_leave_the_cache(units, digest) for digest, _ in inputs}
    for unit in chain.from_iterable(equal.values()):
        # Before anything runs: allocated between transients, they would fragment the memory.
        if not is_large(unit):
            give_gradients(unit)
    kinds = {digest: cycle(alike) for digest, alike in equal.items()}
    idle = IdleLayer.matching(units[0])
    split = SplitBackward()
    with _no_collection(), units[0].keeping_casts(), split.keeping_casts():
        whole_timer = WholeTimer(clock=clock, statistics=statistics)
        split_timer = SplitTimer(clock=clock, statistics=statistics, split=split)

        def add_to(times: Samples, timer: WholeTimer, keys: Sequence[Key]) -> None:
            announced = progress(keys)
            for stretch in stretches(keys, kept_bytes):
                layers = [(next(kinds[key[0]]), inputs[key]) for key in islice(announced, len(stretch))]
                for key, times_us in zip(stretch, in_a_row(timer, layers, idle), strict=True):
                    times[key].append(times_us)
            next(announced, None)  # the last one is done, too

        for timer in (whole_timer, split_timer):
            for stretch in stretches(list(inputs) * _WARM_UPS, kept_bytes):
                in_a_row(timer, [(next(kinds[key[0]]), inputs[key]) for key in stretch], idle)
        # Both in turn, so that a machine that slows down for a while slows whole and split backwards alike.
        while short := [key for key in inputs if min(len(samples[key]), len(halves[key])) < repeats]:
            add_to(samples, whole_timer, short)
            add_to(halves, split_timer, short)
        while doubtful():
            gc.collect()
            add_to(samples, whole_timer, list(inputs) * _BLOCK)
            add_to(halves, split_timer, list(inputs) * _BLOCK)


def stretches(keys: Sequence[Key], kept_bytes: Mapping[Key, int]) -> Iterator[list[Key]]:
    """Yield rows of neighbors of one micro-batch size that keep `_STRETCH_BYTES` for backward; at least one each."""
    stretch: dict[Key, None] = {}
    kept = size = 0
    for key in keys:
        kept += kept_bytes[key]
        if stretch and (kept > _STRETCH_BYTES or key in stretch or key[1] != size):
            yield list(stretch)
            stretch, kept = {}, kept_bytes[key]
        stretch[key], size = None, key[1]
    if stretch:
        yield list(stretch)


def times_of(samples: Sequence[tuple[float, float]]) -> LayerTimes:
    """Return the times of at least 2 repeats."""
    both = [sum(sample) for sample in samples]
    mean = statistics.fmean(both)
    half_width = 1.96 * statistics.stdev(both) / len(both) ** 0.5
    forward_us, backward_us = (typical_us(times) for times in zip(*samples, strict=True))
    return LayerTimes(forward_us=forward_us, backward_us=backward_us, spread=half_width / mean if mean else 0.0)


def doubt(chain: Sequence[str], samples: Mapping[Key, Sequence[tuple[float, float]]]) -> float:
    """Return the relative half-width of the 95 % interval of a chain's time, at the worst micro-batch size.

    Errors of different layers are independent. Equal layers have the same error, because they are measured once.

    Args:
        chain: Digest of every layer.
        samples: Repeats of every digest at every micro-batch size, 2 or more.
    """
    counts, shares = Counter(chain), []
    for size in {size for _, size in samples}:
        times = [(count, times_of(samples[digest, size])) for digest, count in counts.items()]
        widths = [count * (t.forward_us + t.backward_us) * t.spread for count, t in times]
        total_us = sum(count * (t.forward_us + t.backward_us + _OVERHEAD_US) for count, t in times)
        shares.append(math.hypot(*widths) / total_us)
    return max(shares)


def half_times_of(samples: Sequence[tuple[float, float]], whole: LayerTimes) -> tuple[float, float]:
    """Return the times of I and W; I includes the extra time of its forward over one with a whole backward.

    Args:
        samples: Repeats of `SplitTimer`.
        whole: Times of the same layer with a whole backward.
    """
    if not whole.backward_us:
        return 0.0, 0.0
    with_forward_us, weight_us = (typical_us(each) for each in zip(*samples, strict=True))
    return max(0.0, with_forward_us - whole.forward_us), weight_us


def enough_to_leave_the_cache(units: Sequence[Unit], digest: str) -> list[Unit]:
    """Return the first of the equal layers, as many as evict the parameters of one from the cache."""
    equal = [unit for unit in units if unit.digest == digest]
    size = equal[0].parameter_bytes
    return equal[: 1 + CACHE_BYTES // size] if size else equal[:1]


def statistics_us(
    units: Mapping[str, Unit], inputs: Mapping[Key, UnitInput], *, size: int, clock: Clock, repeats: int
) -> dict[str, float]:
    """Return the time of a step to update each unit's running statistics; 0 for those without batch normalization.

    Args:
        units: Units by digest.
        inputs: Their inputs.
        size: Micro-batch size; it makes no difference.
        clock: The device's clock.
        repeats: Number of timed updates.

    Returns:
        Microseconds by digest.
    """
    return {digest: _statistics_us(unit, inputs[digest, size], clock, repeats) for digest, unit in units.items()}


def _statistics_us(unit: Unit, received: UnitInput, clock: Clock, repeats: int) -> float:
    if not any(isinstance(module, _BatchNorm) for module in unit.module.modules()):
        return 0.0
    times = []
    with deferring(unit.module) as statistics, torch.no_grad():
        for _ in range(repeats):
            forward_of(unit, received.non_leaves(), received, outputs=[], statistics=statistics)()
            times.append(clock.time_us(statistics.commit))
    return typical_us(times)


@contextmanager
def _no_collection() -> Iterator[None]:
    # A garbage collection in the middle of a layer would be charged to it.
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
