"""What a kind of device has to tell and to do; one class per kind implements it (`planner.device.kinds`)."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, Protocol, Self

import torch

from planner.core.values.profile import Device
from planner.device.clock import Clock
from planner.device.meter import Meter


class Moment(Protocol):
    """A point in time on the device's own clock, which may run behind the host's."""

    def ns_since(self, earlier: Self) -> int:
        """Nanoseconds between two moments that the device has reached."""
        ...


class Peak(NamedTuple):
    """The most memory that a process had on its device, in bytes."""

    tensor_bytes: int
    outside_bytes: int = 0
    """What the device had in use beside those tensors; 0 where it does not tell."""


class PeakWatch(Protocol):
    """Watches all the memory that a process has, from the moment the watch is made."""

    def begin(self) -> None:
        """Begins the span whose peak is wanted; what is alive counts."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Leaves out what is done within, and leaves nothing behind: releases on other threads may not be seen."""
        ...

    def end(self) -> Peak:
        """Returns the peak since `begin`, and stops watching."""
        ...

    def close(self) -> Peak | None:
        """Stops watching; returns the peak of all so far if `end` was never called and the watch counts by itself."""
        ...


class DeviceKind(ABC):
    """One device, of the type `name`, with all that differs from one kind of device to another."""

    name: ClassVar[str]
    """`torch.device.type`, which is also `device.kind` in files."""
    title: ClassVar[str]
    """The kind's name in messages."""
    communication: ClassVar[str]
    """The backend of `torch.distributed` that sends tensors from one such device to another."""
    transfers_overlap: ClassVar[bool]
    """Whether the device goes on computing while tensors are sent."""
    has_own_memory: ClassVar[bool]
    """Whether tensors lie elsewhere than in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many processes of this machine can have such a device."""

    @classmethod
    @abstractmethod
    def of_rank(cls, local_rank: int) -> torch.device:
        """The device of a process, by its place among those of this machine; the process uses it from now on."""

    @classmethod
    @abstractmethod
    def in_use(cls) -> "DeviceKind | None":
        """The device of this kind that the process computes on beside its host; None if there is none."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The vendor's name of the device."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator | None:
        """The device's own generator of random numbers; None where it is the host's."""

    @abstractmethod
    def described(self) -> Device:
        """Name and memory of the device, and how much of it is not for tensors."""

    @abstractmethod
    def clock(self, threads: int) -> Clock:
        """Makes a clock for short pieces of work, done by so many threads of the host."""

    @abstractmethod
    def meter(self) -> Meter:
        """Makes a meter for the memory of a piece of work."""

    @abstractmethod
    def peak_watch(self) -> PeakWatch:
        """Begins to watch the memory of this process."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Bytes of all tensors on the device; None where nobody counts them."""

    @abstractmethod
    def now(self) -> Moment:
        """The moment at which the device has done all that it was asked to do so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for that moment."""

    @abstractmethod
    def on_host_clock(self) -> tuple[Moment, int]:
        """A moment at which the device has nothing to do, and when that is by `time.perf_counter_ns`."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives back what the device's allocator keeps of freed memory."""
