"""Forward and backward time of every distinct layer at every micro-batch size.

All layers are timed in turn, again and again, rather than each many times in a row: a machine that slows down for a
while then slows all of them alike, and no layer finds its data in a cache that it would not find it in while training.
"""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from planner.profile.clocks import Clock
from planner.profile.memory import start_backward
from planner.profile.units import Unit, UnitInput

__all__ = ["Times", "measure_times"]

_WARM_UPS = 2
"""The first passes fill caches and allocate gradients."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one layer at one micro-batch size."""

    forward_us: float
    backward_us: float
    spread: float
    """Relative half-width of the 95 % interval of forward + backward (of the mean over repeats)."""


def measure_times(
    units: Sequence[Unit],
    inputs: Mapping[tuple[str, int], UnitInput],
    *,
    clock: Clock,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[tuple[str, int], Times]:
    """Times by (unit digest, micro-batch size); gradients exist, as from the second micro-batch on.

    Args:
        units: One per digest.
        inputs: What to run them on.
        clock: The device's clock.
        repeats: Timed passes over all layers, at least 2.
        progress: Called with the layer's name before each timing.
    """
    by_digest = {unit.digest: unit for unit in units}
    forward: dict[tuple[str, int], list[float]] = {key: [] for key in inputs}
    backward: dict[tuple[str, int], list[float]] = {key: [] for key in inputs}
    with _no_collection(), units[0].keeping_casts():
        for turn in range(_WARM_UPS + repeats):
            for key, given in inputs.items():
                unit = by_digest[key[0]]
                progress(unit.name)
                forward_us, backward_us = _once(unit, given, clock)
                if turn >= _WARM_UPS:
                    forward[key].append(forward_us)
                    backward[key].append(backward_us)
    return {key: _summary(clock, forward[key], backward[key]) for key in inputs}


def _once(unit: Unit, given: UnitInput, clock: Clock) -> tuple[float, float]:
    values: list[Any] = [v.clone() if isinstance(v, torch.Tensor) else v for v in given.fresh()]
    outputs: list[Any] = []
    forward_us = clock.time_us(lambda: outputs.extend(unit.run(values, given)))
    started = start_backward(outputs)
    if started is None:
        return forward_us, 0.0
    outputs.clear()
    return forward_us, clock.time_us(started.backward)


def _summary(clock: Clock, forward: list[float], backward: list[float]) -> Times:
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    mean = statistics.fmean(both)
    half_width = 1.96 * statistics.stdev(both) / len(both) ** 0.5
    return Times(
        forward_us=clock.typical_us(forward),
        backward_us=clock.typical_us(backward),
        spread=half_width / mean if mean else 0.0,
    )


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
