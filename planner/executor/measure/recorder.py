"""What a run took: every forward and backward (or half of one) of this process on one clock, step time, peak memory.

Memory is read in the second step, when the optimizer's state exists. On the CPU every allocation since the process
began is counted by torch's profiler until then (see `planner.device.cpu`), which slows these steps: they count as
warm-up. Of a long run the last steps are kept, so that recording takes no more memory the longer it runs.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from planner.core.schedule import KINDS
from planner.device.kind import Moment, Peak
from planner.device.kinds import kind_of
from planner.device.machine import CoreTime, core_time
from planner.executor.measure.run_times import RunSpan, RunSpanKind, RunStep, typical_us

WARM_UP_STEPS = 2

_KEPT_STEPS = 20

_RECOMPUTING = frozenset(kind.label for kind in KINDS.values() if kind.direction < 0)
"""What begins with computing activations again, where that is planned."""


class _Timed(NamedTuple):
    """A span whose times are not known before the device has got there."""

    kind: RunSpanKind
    stage: int
    micro_batch: int
    start: Moment
    end: Moment


class Recorder:
    """Times and memory of one rank. Make it before anything that should count as this rank's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = kind_of(device)
        self._step = 0
        self._pending: list[_Timed] = []
        self._backward_of: int | None = None
        self.first_micro_batch = 0
        """What the micro-batches that are timed are counted from: a mini-batch may run in several parts."""
        self.steps: deque[RunStep] = deque(maxlen=_KEPT_STEPS)
        """The last steps, warm-up included, on the clock of `time.perf_counter_ns`."""
        self.step_us: list[float] = []
        self.peak = Peak(0)
        """The most memory of this rank; known behind the step in which memory is read."""
        gc.collect()  # what is garbage by now is not this rank's, and must not be taken off its memory later
        self._memory = self._device.peak_watch()
        self._warm = CoreTime()
        """Of this thread as the warm-up ended."""
        self.core_share = 0.0
        """Since then: of the time that it wanted to run, how much it did; 0 where that is not known."""

    def timed(self, kind: RunSpanKind, work: Callable[[], Any], *, stage: int = 0, micro_batch: int = 0) -> Any:
        """Runs `work` and notes its time as `kind` of a micro-batch on one of the process's stages."""
        micro_batch += self.first_micro_batch
        self._backward_of = micro_batch if kind in _RECOMPUTING else None
        result = self._noted(kind, work, stage, micro_batch)
        self._backward_of = None
        return result

    def timed_again(self, work: Callable[[], Any], *, stage: int = 0) -> Any:
        """Runs `work`, which is recomputation if a backward is being timed."""
        if self._backward_of is None:
            return work()
        return self._noted("recompute", work, stage, self._backward_of)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, from first forward to the optimizer's step."""
        if self._step == WARM_UP_STEPS - 1:
            self._memory.begin()
        base, base_ns = self._device.on_host_clock()
        begin_ns = time.perf_counter_ns()
        yield
        self._device.synchronize()
        self.step_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        self.steps.append(RunStep(self._step, self._collected(base, base_ns)))
        if self._step == WARM_UP_STEPS - 1:
            self.peak = self._memory.end()
            self._warm = core_time()
        elif self._step >= WARM_UP_STEPS:
            self.core_share = core_time().since(self._warm).share
        self._step += 1

    @contextmanager
    def optimizer(self, *, stage: int = 0) -> Iterator[None]:
        """What follows the last backward: the optimizer's step."""
        start = self._device.now()
        yield
        self._pending.append(_Timed("optimizer", stage, 0, start, self._device.now()))

    def typical_us(self, kind: RunSpanKind, *, stage: int = 0) -> float:
        """What one micro-batch's `kind` took, see `run_times.typical_us`; 0 if nothing was timed."""
        return typical_us([step.spans for step in self.steps if step.number >= WARM_UP_STEPS], kind, stage)

    def paused(self) -> AbstractContextManager[None]:
        """Leaves out of the memory what is done within, and leaves nothing behind."""
        return self._memory.paused()

    def close(self) -> None:
        """Stops recording; a run too short to reach the step whose memory is read has the peak of all it did."""
        self.peak = self._memory.close() or self.peak

    def _noted(self, kind: RunSpanKind, work: Callable[[], Any], stage: int, micro_batch: int) -> Any:
        start = self._device.now()
        result = work()
        self._pending.append(_Timed(kind, stage, micro_batch, start, self._device.now()))
        return result

    def _collected(self, base: Moment, base_ns: int) -> tuple[RunSpan, ...]:
        """The step's spans on the host's clock, by which the device reached `base` at `base_ns`."""
        spans = tuple(
            RunSpan(kind, stage, micro_batch, *(base_ns + moment.ns_since(base) for moment in moments))
            for kind, stage, micro_batch, *moments in self._pending
        )
        self._pending.clear()
        return spans
