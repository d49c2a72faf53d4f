"""Forward and backward time of every distinct layer at every micro-batch size; its backward whole, and in halves.

All layers are timed in turn, again and again, rather than each many times in a row: a machine that slows down for a
while then slows all of them alike, and no layer finds its data in a cache that it would not find it in while training.
For the same reason equal layers of a model take turns: one of them alone would keep its parameters in the cache.
"""

import gc
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_unflatten

from planner.device.clock import Clock, typical_us
from planner.device.machine import CACHE_BYTES
from planner.model.batch_norm import BatchStatistics, deferring
from planner.model.halves import PutOff, SplitBackward
from planner.model.stage import ModelStage
from planner.profile.memory import start_backward
from planner.profile.units import Key, Unit, UnitInput

_WARM_UPS = 2
"""The first passes fill caches and let libraries choose their kernels."""

_BLOCK = 5
"""Repeats between two looks at whether they suffice."""

Samples = dict[Key, list[tuple[float, float]]]
"""Two times of every repeat, in microseconds: of forward and backward, or of a backward's halves, I and W."""


@dataclass(frozen=True, kw_only=True)
class Times:
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
    progress: Callable[[list[Key]], Iterator[Key]],
) -> None:
    """Adds repeats to `samples` and `halves`; gradients exist, as from the second micro-batch on.

    Args:
        units: Every layer's.
        inputs: What to run them on, once per digest and micro-batch size.
        samples: What was measured before of forward and backward; an entry for every key of `inputs`.
        halves: What was measured before of forward and I together, and of W; as many entries.
        statistics: Of the layers' batch normalisations, which are collected as in training.
        clock: The device's clock.
        repeats: Timed passes over all layers at least, 2 or more.
        doubtful: Whether still more are needed, once there are so many.
        progress: Passes on what will be measured, one by one.
    """
    equal = {digest: enough_to_leave_the_cache(units, digest) for digest, _ in inputs}
    for unit in chain.from_iterable(equal.values()):
        # Before anything runs: between transients they would leave holes too small for the next large one.
        if not _is_large(unit):
            _give_gradients(unit)
    kinds = {digest: cycle(alike) for digest, alike in equal.items()}
    split = SplitBackward()
    with _no_collection(), units[0].keeping_casts(), split.keeping_casts():
        whole = partial(time_once, clock=clock, statistics=statistics)
        in_halves = partial(time_halves_once, clock=clock, statistics=statistics, split=split)

        def run(keys: Iterable[Key], once: Callable[[Unit, UnitInput], tuple[float, float]]) -> _Timed:
            return ((key, once(next(kinds[key[0]]), inputs[key])) for key in keys)

        for once in (whole, in_halves):
            deque(run(list(inputs) * _WARM_UPS, once), maxlen=0)
        # Both in turn, so that a machine that slows down for a while slows halves as it slows what they are halves of.
        while short := [key for key in inputs if min(len(samples[key]), len(halves[key])) < repeats]:
            _add_to(samples, run(progress(short), whole))
            _add_to(halves, run(progress(short), in_halves))
        while doubtful():
            gc.collect()
            _add_to(samples, run(progress(list(inputs) * _BLOCK), whole))
            _add_to(halves, run(progress(list(inputs) * _BLOCK), in_halves))


_Timed = Iterator[tuple[Key, tuple[float, float]]]


def _add_to(samples: Samples, timed: _Timed) -> None:
    for key, times_us in timed:
        samples[key].append(times_us)


def times_of(samples: Sequence[tuple[float, float]]) -> Times:
    """What to keep of at least 2 repeats."""
    both = [sum(sample) for sample in samples]
    mean = statistics.fmean(both)
    half_width = 1.96 * statistics.stdev(both) / len(both) ** 0.5
    forward_us, backward_us = (typical_us(times) for times in zip(*samples, strict=True))
    return Times(forward_us=forward_us, backward_us=backward_us, spread=half_width / mean if mean else 0.0)


def half_times_of(samples: Sequence[tuple[float, float]], whole: Times) -> tuple[float, float]:
    """What I and W take; I with what its forward takes longer than that of a backward in one piece.

    Args:
        samples: Repeats of `time_halves_once`.
        whole: Times of the same layer, its backward in one piece.
    """
    if not whole.backward_us:
        return 0.0, 0.0
    with_forward_us, weight_us = (typical_us(each) for each in zip(*samples, strict=True))
    return max(0.0, with_forward_us - whole.forward_us), weight_us


def enough_to_leave_the_cache(units: Sequence[Unit], digest: str) -> list[Unit]:
    """The first of the equal layers, as many as it takes until one's parameters are no longer in the cache."""
    equal = [unit for unit in units if unit.digest == digest]
    size = equal[0].parameter_bytes
    return equal[: 1 + CACHE_BYTES // size] if size else equal[:1]


def time_once(unit: Unit, received: UnitInput, *, clock: Clock, statistics: BatchStatistics) -> tuple[float, float]:
    """Forward and backward time of one micro-batch in microseconds, gradients being there.

    Those of a large unit are not: autograd keeps what it computed, and what it takes to add so much is timed after it.
    Two tables of gradients at once would be most of what profiling takes, with a vocabulary of 50,000 words.
    """
    large = _is_large(unit)
    if not large:
        _give_gradients(unit)
    outputs: list[Any] = []
    forward_us = clock.time_us(_forward(unit, received, outputs, statistics))
    started = start_backward(outputs)
    if started is None:
        return forward_us, 0.0
    outputs.clear()
    backward_us = clock.time_us(started.backward)
    if large:
        backward_us += sum(_adding_us(p.grad, clock) for p in unit.module.parameters() if p.grad is not None)
        _take_gradients(unit)
    return forward_us, backward_us


def time_halves_once(
    unit: Unit, received: UnitInput, *, clock: Clock, statistics: BatchStatistics, split: SplitBackward
) -> tuple[float, float]:
    """What forward and I, and what W of one micro-batch take in microseconds; otherwise as `time_once`.

    A forward whose backward will be split takes longer: what the split needs is written down as it runs.
    """
    large = _is_large(unit)
    if not large:
        _give_gradients(unit)
    outputs: list[Any] = []
    with split.splitting():
        forward_us = clock.time_us(_forward(unit, received, outputs, statistics))
    started = start_backward(outputs)
    if started is None:
        return forward_us, 0.0
    outputs.clear()
    put_off: PutOff = []
    one = torch.ones_like(started)
    input_us = clock.time_us(lambda: put_off.extend(split.backward_input([started], [one])))
    made_by_input = {p for p in unit.module.parameters() if p.grad is not None}
    weight_us = clock.time_us(lambda: split.backward_weight(put_off)) if put_off else 0.0
    if large:
        gradients = {p: p.grad for p in unit.module.parameters() if p.grad is not None}
        input_us += sum(_adding_us(gradient, clock) for p, gradient in gradients.items() if p in made_by_input)
        weight_us += sum(_adding_us(gradient, clock) for p, gradient in gradients.items() if p not in made_by_input)
        _take_gradients(unit)
    return forward_us + input_us, weight_us


def _forward(unit: Unit, received: UnitInput, outputs: list[Any], statistics: BatchStatistics) -> Callable[[], None]:
    """A forward as a stage runs it, which leaves what it makes in `outputs`."""
    values = received.non_leaves()

    def run() -> None:
        with statistics.collecting():
            outputs.extend(unit.run(values, received))

    return run


def statistics_us(
    units: Mapping[str, Unit], inputs: Mapping[Key, UnitInput], *, size: int, clock: Clock, repeats: int
) -> dict[str, float]:
    """What a step takes to update each unit's running statistics; 0 for those without batch normalisation.

    Args:
        units: By digest.
        inputs: What to run them on.
        size: Micro-batch size; it makes no difference.
        clock: The device's clock.
        repeats: How many updates are timed.
    """
    return {digest: _statistics_us(unit, inputs[digest, size], clock, repeats) for digest, unit in units.items()}


def _statistics_us(unit: Unit, received: UnitInput, clock: Clock, repeats: int) -> float:
    if not any(isinstance(module, _BatchNorm) for module in unit.module.modules()):
        return 0.0
    times = []
    with deferring(unit.module) as statistics, torch.no_grad():
        for _ in range(repeats):
            _forward(unit, received, [], statistics)()
            times.append(clock.time_us(statistics.commit))
    return typical_us(times)


def passing_us(
    units: Mapping[str, Unit], inputs: Mapping[Key, UnitInput], *, clock: Clock, repeats: int
) -> dict[Key, float]:
    """What it takes a stage to get past the modules in front of it; 0 for layers of a Sequential, which pass nothing.

    Every layer that is measured alone pays for that, a stage of several layers once. So it is taken off the time of
    each layer, and layers add up to stages and to the model.
    """
    return {key: _passing_us(units[key[0]].module, received, clock, repeats) for key, received in inputs.items()}


def _passing_us(stage: nn.Module, received: UnitInput, clock: Clock, repeats: int) -> float:
    if not isinstance(stage, ModelStage):
        return 0.0
    value = tree_unflatten(received.fresh(), received.spec)
    return typical_us([clock.time_us(lambda: stage.pass_over(value)) for _ in range(repeats + 1)][1:])


def _adding_us(gradient: Tensor, clock: Clock) -> float:
    """Time to add a gradient to one that is there, of which as much exists at once as no cache holds."""
    if gradient.is_sparse:
        return 0.0  # the next one is written beside it
    flat = gradient.as_strided((gradient.numel(),), (1,))
    there = torch.zeros_like(flat[: CACHE_BYTES // flat.element_size()])
    adding_us = 0.0
    for part in flat.split(len(there)):
        beside = there[: len(part)]
        adding_us += clock.time_us(partial(_add, beside, part))
    return adding_us


def _add(there: Tensor, gradient: Tensor) -> None:
    there.add_(gradient)


def _is_large(unit: Unit) -> bool:
    """Whether its gradients are there only while it runs."""
    return unit.parameter_bytes > CACHE_BYTES


def _take_gradients(unit: Unit) -> None:
    unit.module.zero_grad()
    # What is left of the run would lie in the middle of the room that this leaves. It is young: nothing was since.
    gc.collect(0)


def _give_gradients(unit: Unit) -> None:
    for parameter in unit.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


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
