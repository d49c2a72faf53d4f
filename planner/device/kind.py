"""Interface of a kind of device. `planner.device.kinds` lists the classes that implement the interface."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, Protocol, Self

import torch

from planner.core.values.profile import Device
from planner.device.clock import Clock
from planner.device.machine import CACHE_BYTES
from planner.device.meter import MemoryMeter


class Moment(Protocol):
    """Point in time on the device's own clock, such as a recorded CUDA event. The device may reach it later."""

    def ns_since(self, earlier: Self) -> int:
        """Return the nanoseconds since `earlier`. The device must have reached both points in time."""


class Peak(NamedTuple):
    """Peak memory of a process on its device, in bytes."""

    tensor_bytes: int
    outside_bytes: int = 0
    """Device memory in use for other purposes than tensors; 0 if unknown."""


class PeakWatch(Protocol):
    """Interface to record a process's peak memory. Recording begins when the object is created."""

    def begin(self) -> None:
        """Begin the measured period. Memory that is already allocated counts towards the peak."""

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the allocations of its block out of the peak.

        The block must release these allocations, on the same thread.
        """

    def end(self) -> Peak:
        """Stop recording, and return the peak memory since `begin`."""

    def close(self) -> Peak | None:
        """Stop recording, unless `end` has already stopped it.

        Returns:
            On CPUs, the peak memory since `begin`, or None if `end` was called before. On GPUs, always None.
        """


class DeviceKind(ABC):
    """Interface of a kind of device: all operations that differ between CPUs and GPUs."""

    name: ClassVar[str]
    """Value of `torch.device.type`, which is also `device.kind` in files."""
    title: ClassVar[str]
    """Name of the kind in messages."""
    communication: ClassVar[str]
    """Backend of `torch.distributed` that sends tensors between devices of this kind."""
    transfers_overlap: ClassVar[bool]
    """True if the device can compute while it sends or receives tensors."""
    has_own_memory: ClassVar[bool]
    """True if the device stores tensors in its own memory, not in the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def device_count(cls) -> int:
        """Return the number of devices on this machine; `sys.maxsize` for the CPU, which processes share."""

    @classmethod
    @abstractmethod
    def select_device_of_rank(cls, local_rank: int) -> torch.device:
        """Return the device for a process's rank on this machine, and make it torch's current device."""

    @classmethod
    @abstractmethod
    def accelerator_in_use(cls) -> "DeviceKind | None":
        """Return the accelerator of this kind that this process already uses; None if it uses none."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Name that the vendor gives the device."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator | None:
        """Random number generator of the device; None if the device uses the host's generator."""

    @abstractmethod
    def describe(self) -> Device:
        """Return the device's name, its memory, and its reserve: memory that is not available for tensors."""

    def min_bytes_of_timed_layers(self) -> int:
        """Return the number of bytes that the parameters of equal layers, timed in a cycle, should exceed in total.

        If one layer ran repeatedly, its parameters would stay in the cache. The repeats therefore cycle through layers
        with equal operators. Layers are added to the cycle until their parameters exceed this size.
        """
        return CACHE_BYTES

    @abstractmethod
    def clock(self, threads: int) -> Clock:
        """Return a clock to measure functions that run on `threads` threads of the host."""

    @abstractmethod
    def meter(self) -> MemoryMeter:
        """Return a meter that measures the memory of a function."""

    @abstractmethod
    def peak_watch(self) -> PeakWatch:
        """Return a running recorder of this process's peak memory."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Return the bytes of all tensors on the device; None if the device does not count them."""

    @abstractmethod
    def current_moment(self) -> Moment:
        """Return the point in time at which the device completes the work submitted so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has completed all submitted work."""

    @abstractmethod
    def moment_with_host_time(self) -> tuple[Moment, int]:
        """Return one point in time on two clocks: the device's, and the host's `time.perf_counter_ns`.

        The device first completes all submitted work.
        """

    @abstractmethod
    def empty_cache(self) -> None:
        """Release freed memory that the device's allocator keeps."""
