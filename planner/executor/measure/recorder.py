"""Record the forwards and backwards of this process on one clock, step times, and peak memory.

Memory is read in the second step, when the optimizer's state exists. On the CPU, torch's profiler counts every
allocation from the start of the process until then (see `planner.device.cpu`). This slows these steps, so they are
warm-up. Only the last steps are kept, so that the memory of recording does not grow with the length of the run.
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
"""Actions that may begin with recomputation."""


class _Timed(NamedTuple):
    """Span whose times are unknown until the device has reached them."""

    kind: RunSpanKind
    stage: int
    micro_batch: int
    start: Moment
    end: Moment


class Recorder:
    """Recorder of times and memory of one rank. Make it before any memory of this rank is allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = kind_of(device)
        self._step = 0
        self._pending: list[_Timed] = []
        self._backward_of: int | None = None
        self.first_micro_batch = 0
        """Index of the first micro-batch of the current part: a mini-batch may run in several parts."""
        self.steps: deque[RunStep] = deque(maxlen=_KEPT_STEPS)
        """Last steps, including warm-up, on the clock of `time.perf_counter_ns`."""
        self.step_us: list[float] = []
        self.peak = Peak(0)
        """Peak memory of this rank; known after the step in which memory is read."""
        gc.collect()  # existing garbage must not reduce this rank's memory later
        self._memory = self._device.peak_watch()
        self._warm = CoreTime()
        """CPU time of this thread at the end of the warm-up."""
        self.core_share = 0.0
        """Share of the time since then that the thread wanted to run and did; 0 if unknown."""

    def timed(self, kind: RunSpanKind, work: Callable[[], Any], *, stage: int = 0, micro_batch: int = 0) -> Any:
        """Run `work` and record its time as an action of a micro-batch.

        Args:
            kind: Kind of the action.
            work: Function to run.
            stage: Stage of the process.
            micro_batch: Index in the current part.

        Returns:
            The result of `work`.
        """
        micro_batch += self.first_micro_batch
        self._backward_of = micro_batch if kind in _RECOMPUTING else None
        result = self._noted(kind, work, stage, micro_batch)
        self._backward_of = None
        return result

    def timed_recomputation(self, work: Callable[[], Any], *, stage: int = 0) -> Any:
        """Run `work`; if a backward is being timed, count the time of `work` as recomputation."""
        if self._backward_of is None:
            return work()
        return self._noted("recompute", work, stage, self._backward_of)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one training step inside the block, from first forward to the optimizer's step."""
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
        """Record the block as the optimizer's step."""
        start = self._device.now()
        yield
        self._pending.append(_Timed("optimizer", stage, 0, start, self._device.now()))

    def typical_us(self, kind: RunSpanKind, *, stage: int = 0) -> float:
        """Return the typical time of an action in microseconds, see `run_times.typical_us`; 0 if nothing was timed."""
        return typical_us([step.spans for step in self.steps if step.number >= WARM_UP_STEPS], kind, stage)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose allocations do not count; it must release them."""
        return self._memory.paused()

    def close(self) -> None:
        """Stop recording; a run too short for the step whose memory is read gets the peak of the whole run."""
        self.peak = self._memory.close() or self.peak

    def _noted(self, kind: RunSpanKind, work: Callable[[], Any], stage: int, micro_batch: int) -> Any:
        start = self._device.now()
        result = work()
        self._pending.append(_Timed(kind, stage, micro_batch, start, self._device.now()))
        return result

    def _collected(self, base: Moment, base_ns: int) -> tuple[RunSpan, ...]:
        """Return the step's spans on the host's clock, on which the device reached `base` at `base_ns`."""
        spans = tuple(
            RunSpan(kind, stage, micro_batch, *(base_ns + moment.ns_since(base) for moment in moments))
            for kind, stage, micro_batch, *moments in self._pending
        )
        self._pending.clear()
        return spans
