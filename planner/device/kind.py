"""Define the interface of a kind of device. `planner.device.kinds` lists the classes that implement it."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, Protocol, Self

import torch

from planner.core.values.profile import Device
from planner.device.clock import Clock
from planner.device.meter import Meter


class Moment(Protocol):
    """Point in time on the device's own clock; the device may reach it later than the host creates it."""

    def ns_since(self, earlier: Self) -> int:
        """Return the nanoseconds from `earlier` to this point in time; the device must have reached both."""
        ...


class Peak(NamedTuple):
    """Peak memory of a process on its device, in bytes."""

    tensor_bytes: int
    outside_bytes: int = 0
    """Bytes of the device that were in use for other purposes than tensors; 0 if unknown."""


class PeakWatch(Protocol):
    """Interface of an object that records the memory of this process, from its creation, to find the peak."""

    def begin(self) -> None:
        """Begin the period of which the peak is measured; memory that is already in use counts."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager whose allocations do not count; the block must release them, on the same thread."""
        ...

    def end(self) -> Peak:
        """Stop watching, and return the peak memory since `begin`."""
        ...

    def close(self) -> Peak | None:
        """Stop watching.

        Returns:
            Peak memory since `begin`, or since the creation without `begin`. None after `end`, and always for GPUs.
        """
        ...


class DeviceKind(ABC):
    """Interface of a device, for everything that differs between CPUs and GPUs; one subclass per kind."""

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
    def count(cls) -> int:
        """Return the number of processes on this machine that can each have a device of this kind."""

    @classmethod
    @abstractmethod
    def of_rank(cls, local_rank: int) -> torch.device:
        """Return the device of the process with the given rank on this machine, and make it the current device."""

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
        """Random number generator of the device; None if the device uses that of the host."""

    @abstractmethod
    def describe(self) -> Device:
        """Return the device's name, its memory, and the part of the memory that is not available for tensors."""

    @abstractmethod
    def clock(self, threads: int) -> Clock:
        """Return a clock for short functions that use `threads` threads of the host."""

    @abstractmethod
    def meter(self) -> Meter:
        """Return a meter that measures the memory of a function."""

    @abstractmethod
    def peak_watch(self) -> PeakWatch:
        """Start a watch of the memory of this process, and return it."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Return the bytes of all tensors on the device; None if this kind of device does not count them."""

    @abstractmethod
    def current_moment(self) -> Moment:
        """Return the point in time at which the device completes all work submitted so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has completed all submitted work."""

    @abstractmethod
    def moment_on_both_clocks(self) -> tuple[Moment, int]:
        """Return one point in time on both clocks: the device's, and the host's `time.perf_counter_ns`.

        The device is idle at this time.
        """

    @abstractmethod
    def empty_cache(self) -> None:
        """Release freed memory that the device's allocator keeps."""
