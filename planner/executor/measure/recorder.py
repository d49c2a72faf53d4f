"""Recorder of the times of this process's forwards and backwards, of step times, and of peak memory.

Memory is read in the second step, when the optimizer's state exists. On the CPU, torch's profiler counts every
allocation from the start of the process to the end of this step (see `planner.device.cpu`). This slows the first two
steps, so they count as warm-up.
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
from planner.device.machine import ThreadTime, thread_time
from planner.executor.measure.run_times import RunSpan, RunSpanKind, RunStep, typical_action_us

WARM_UP_STEPS = 2

_KEPT_STEPS = 20

_RECOMPUTING = frozenset(kind.label for kind in KINDS.values() if kind.direction < 0)
"""Kinds of actions that may begin with a recomputation."""


class _PendingSpan(NamedTuple):
    kind: RunSpanKind
    stage: int
    micro_batch: int
    start: Moment
    end: Moment


class RunRecorder:
    """Recorder of one rank's times and memory. Create it before the rank allocates memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = kind_of(device)
        self._step = 0
        self._pending: list[_PendingSpan] = []
        self._backward_of: int | None = None
        self.first_micro_batch = 0
        """Index, in the step, of the first micro-batch of the current part. A step may have several parts."""
        self.steps: deque[RunStep] = deque(maxlen=_KEPT_STEPS)
        """Last steps, including warm-up, on the clock of `time.perf_counter_ns`."""
        self.step_us: list[float] = []
        self.peak = Peak(0)
        """Peak memory of this rank; known after the second step."""
        gc.collect()  # otherwise garbage that is collected later would reduce the measured memory
        self._memory = self._device.peak_watch()
        self._warm = ThreadTime()
        """Run and waiting time of this thread until the end of the warm-up."""
        self.core_share = 0.0
        """Run time of this thread since the warm-up, as a share of run time and wait for a CPU core; 0 if unknown."""

    def timed(self, kind: RunSpanKind, work: Callable[[], Any], *, stage: int = 0, micro_batch: int = 0) -> Any:
        """Run `work`, and record its time as an action of a micro-batch.

        Args:
            kind: Kind of the action.
            work: Function to run.
            stage: Index of the stage.
            micro_batch: Index of the micro-batch in the current part of the mini-batch.

        Returns:
            Result of `work`.
        """
        micro_batch += self.first_micro_batch
        self._backward_of = micro_batch if kind in _RECOMPUTING else None
        result = self._record_times(kind, work, stage, micro_batch)
        self._backward_of = None
        return result

    def timed_recomputation(self, work: Callable[[], Any], *, stage: int = 0) -> Any:
        """Run `work` and return its result. If a backward is being timed, record the time as recomputation."""
        if self._backward_of is None:
            return work()
        return self._record_times("recompute", work, stage, self._backward_of)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the block as one training step, from the first forward to the optimizer's step."""
        if self._step == WARM_UP_STEPS - 1:
            self._memory.begin()
        base, base_ns = self._device.moment_with_host_time()
        begin_ns = time.perf_counter_ns()
        yield
        self._device.synchronize()
        self.step_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        self.steps.append(RunStep(self._step, self._spans_on_host_clock(base, base_ns)))
        if self._step == WARM_UP_STEPS - 1:
            self.peak = self._memory.end()
            self._warm = thread_time()
        elif self._step >= WARM_UP_STEPS:
            self.core_share = thread_time().since(self._warm).share
        self._step += 1

    @contextmanager
    def optimizer(self, *, stage: int = 0) -> Iterator[None]:
        """Record the block as the optimizer's step."""
        start = self._device.current_moment()
        yield
        self._pending.append(_PendingSpan("optimizer", stage, 0, start, self._device.current_moment()))

    def typical_action_us(self, kind: RunSpanKind, *, stage: int = 0) -> float:
        """Return the typical time of an action, in microseconds; 0 if none was timed."""
        return typical_action_us([step.spans for step in self.steps if step.number >= WARM_UP_STEPS], kind, stage)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for a block whose allocations do not count. The block must release them."""
        return self._memory.paused()

    def close(self) -> None:
        """Stop recording. On the CPU, set `peak` to the peak memory so far, unless `step` has set it."""
        self.peak = self._memory.close() or self.peak

    def _record_times(self, kind: RunSpanKind, work: Callable[[], Any], stage: int, micro_batch: int) -> Any:
        start = self._device.current_moment()
        result = work()
        self._pending.append(_PendingSpan(kind, stage, micro_batch, start, self._device.current_moment()))
        return result

    def _spans_on_host_clock(self, base: Moment, base_ns: int) -> tuple[RunSpan, ...]:
        spans = tuple(
            RunSpan(kind, stage, micro_batch, *(base_ns + moment.ns_since(base) for moment in moments))
            for kind, stage, micro_batch, *moments in self._pending
        )
        self._pending.clear()
        return spans
