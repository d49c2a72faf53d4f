"""The CPU of this machine as a device. Calls return when their result is complete, and tensors are in host memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self

import torch

from planner.core.values.profile import Device
from planner.device.clock import CpuClock
from planner.device.kind import DeviceKind, Peak
from planner.device.machine import cpu_name
from planner.device.meter import CpuMemoryMeter, recorded_allocations


class Cpu(DeviceKind):
    """CPU of this machine, shared by all processes on the machine."""

    name, title = "cpu", "CPU"
    communication = "gloo"
    transfers_overlap = has_own_memory = False
    # The CPU has no random generator of its own: it uses that of the host.
    generator = None

    @classmethod
    def device_count(cls) -> int:
        return sys.maxsize

    @classmethod
    def select_device_of_rank(cls, local_rank: int) -> torch.device:  # noqa: ARG003
        return torch.device("cpu")

    @classmethod
    def accelerator_in_use(cls) -> None:
        return

    @property
    def model_name(self) -> str:
        return cpu_name()

    def describe(self) -> Device:
        return Device(kind="cpu", name=cpu_name())

    def clock(self, threads: int) -> CpuClock:
        return CpuClock(threads)

    def meter(self) -> CpuMemoryMeter:
        return CpuMemoryMeter()

    def peak_watch(self) -> "_AllocationWatch":
        return _AllocationWatch()

    def allocated_bytes(self) -> None:
        return

    def current_moment(self) -> "_HostMoment":
        return _HostMoment(time.perf_counter_ns())

    def synchronize(self) -> None:
        return

    def moment_with_host_time(self) -> "tuple[_HostMoment, int]":
        moment = self.current_moment()
        return moment, moment.ns

    def empty_cache(self) -> None:
        return


class _HostMoment(NamedTuple):
    ns: int

    def ns_since(self, earlier: Self) -> int:
        return self.ns - earlier.ns


class _AllocationWatch:
    """Peak memory of this process, computed from recorded allocations, because torch has no statistics for CPUs."""

    def __init__(self) -> None:
        self._live_bytes = 0
        self._recording = ExitStack()
        self._has_ended = False
        self._start()

    def begin(self) -> None:
        with self.paused():
            pass  # replaces the list of earlier allocations by their sum

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._live_bytes += sum(self._stop())
        try:
            yield
        finally:
            self._start()

    def end(self) -> Peak:
        self._has_ended = True
        live = peak = self._live_bytes
        for size in self._stop():
            live += size
            peak = max(peak, live)
        return Peak(peak)

    def close(self) -> Peak | None:
        return None if self._has_ended else self.end()

    def _start(self) -> None:
        self._sizes = self._recording.enter_context(recorded_allocations())

    def _stop(self) -> list[int]:
        self._recording.close()
        return self._sizes
