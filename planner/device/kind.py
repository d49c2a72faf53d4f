"""Interface of a kind of device, with one class per kind (`planner.device.kinds`)."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, Protocol, Self

import torch

from planner.core.values.profile import Device
from planner.device.clock import Clock
from planner.device.meter import Meter


class Moment(Protocol):
    """Point in time on the device's own clock, which may be later than the host's."""

    def ns_since(self, earlier: Self) -> int:
        """Return the nanoseconds between two points in time that the device has reached."""
        ...


class Peak(NamedTuple):
    """Peak memory of a process on its device, in bytes."""

    tensor_bytes: int
    outside_bytes: int = 0
    """Bytes that the device had in use in addition to tensors; 0 if unknown."""


class PeakWatch(Protocol):
    """Watch of all memory of a process, which starts when the watch is made."""

    def begin(self) -> None:
        """Begin the period whose peak is measured; memory that is in use counts."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose allocations do not count; it must release them on this thread."""
        ...

    def end(self) -> Peak:
        """Return the peak since `begin`, and stop watching."""
        ...

    def close(self) -> Peak | None:
        """Stop watching.

        Returns:
            The peak of the whole time if `end` was never called and the watch counts allocations itself; else None.
        """
        ...


class DeviceKind(ABC):
    """Device of the type `name`, with all differences between kinds of devices."""

    name: ClassVar[str]
    """Value of `torch.device.type`, which is also `device.kind` in files."""
    title: ClassVar[str]
    """Name of the kind in messages."""
    communication: ClassVar[str]
    """Backend of `torch.distributed` that sends tensors between such devices."""
    transfers_overlap: ClassVar[bool]
    """True if the device computes while tensors are sent."""
    has_own_memory: ClassVar[bool]
    """True if tensors are not in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Return how many processes of this machine can have such a device."""

    @classmethod
    @abstractmethod
    def of_rank(cls, local_rank: int) -> torch.device:
        """Return the device of a process, by its local rank on this machine, and make it the current device."""

    @classmethod
    @abstractmethod
    def in_use(cls) -> "DeviceKind | None":
        """Return the accelerator of this kind that the process uses; None if there is none."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Vendor's name of the device."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator | None:
        """Random number generator of the device; None if it uses the host's."""

    @abstractmethod
    def described(self) -> Device:
        """Return name and memory of the device, and the part of it that is not for tensors."""

    @abstractmethod
    def clock(self, threads: int) -> Clock:
        """Return a clock for short functions that use this number of host threads."""

    @abstractmethod
    def meter(self) -> Meter:
        """Return a meter for the memory of a function."""

    @abstractmethod
    def peak_watch(self) -> PeakWatch:
        """Begin to watch the memory of this process."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Return the bytes of all tensors on the device; None if they are not counted."""

    @abstractmethod
    def now(self) -> Moment:
        """Return the time at which the device will have done all work submitted so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all submitted work is done."""

    @abstractmethod
    def on_host_clock(self) -> tuple[Moment, int]:
        """Return a time at which the device is idle, and the same time by `time.perf_counter_ns`."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release freed memory that the device's allocator keeps."""
