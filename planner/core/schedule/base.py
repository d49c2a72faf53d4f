"""Base class of schedules, and the actions that schedules consist of.

    K   devices in a pipeline
    M   micro-batches of a step
    V   chunks: number of stages of each device (see `planner.core.values.placement`)

To add a schedule, write a module with a subclass and add it to `planner.core.schedule.SCHEDULES`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import ClassVar, Final, NamedTuple

from planner.core.errors import UsageError
from planner.core.schedule.kinds import KINDS, Letter
from planner.core.values.limits import MOST_ACTIONS
from planner.core.values.placement import Placement, stages_on
from planner.core.values.plan import ScheduleName

_LETTERS: Final[Mapping[str, Letter]] = {letter: letter for letter in KINDS}
_NUMBER: Final = "(0|[1-9][0-9]{0,8})"
_ACTION: Final = re.compile(f"{_NUMBER}([{''.join(KINDS)}]){_NUMBER}")


class Action(NamedTuple):
    """One forward, backward, input-gradient or weight-gradient pass of a micro-batch on a stage."""

    stage: int
    """Index of the stage in the pipeline, from 0."""
    kind: Letter
    micro_batch: int

    def __str__(self) -> str:
        """Return the notation of torch's schedule files: `2F3` is the forward of micro-batch 3 on stage 2."""
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def from_text(cls, text: str) -> "Action | None":
        """Return the action written as `2F3`; None if the text is not an action or has a number of over nine digits."""
        match = _ACTION.fullmatch(text)
        return None if match is None else cls(int(match[1]), _LETTERS[match[2]], int(match[3]))


class ComputeTimeBounds(NamedTuple):
    """Lower bounds of the compute times of one micro-batch, in microseconds. The bounds hold for every partition.

    The time of a device is the sum of the times of its stages.
    """

    work_us: float
    """Forward plus backward time of all layers on the fastest device."""
    forward_us: float
    """Lower bound of the largest forward time over all devices."""
    backward_us: float
    """Lower bound of the largest backward time over all devices."""
    pair_us: float
    """Lower bound of the largest sum of forward and backward time over all devices."""


class Schedule(ABC):
    """Order in which devices run the forwards and backwards of a step."""

    name: ClassVar[ScheduleName]
    """Name in options and files."""
    title: ClassVar[str]
    """Name in the literature."""
    torch_name: ClassVar[str]
    """Name for `torch.distributed.pipelining.schedules.get_schedule_class`; empty if torch lacks the schedule."""
    is_chunked: ClassVar[bool] = False
    """True if a device may run several stages."""
    exact_chunks: ClassVar[int | None] = None
    """Number of stages per device that the schedule requires, such as 2 for a V-shaped placement; None if not fixed."""
    placement: ClassVar[Placement] = "loop"
    """Placement of the stages on the devices."""
    is_forwards_first: ClassVar[bool] = False
    """True if every device runs all forwards of a step before its first backward."""
    needs_search: bool = False
    """True if the solver must search action orders for the schedule."""
    splits_backward: ClassVar[bool] = False
    """True if some or all backwards are split into an input-gradient (I) and a weight-gradient (W) pass."""
    has_closed_form: ClassVar[bool] = False
    """True if `planner.core.cost.step_time` computes the step time by a formula, without simulation."""
    has_known_peak_points: ClassVar[bool] = False
    """True if `planner.core.cost.peak_points` lists the points in the step at which a stage's memory may peak."""
    is_one_forward_one_backward: ClassVar[bool] = False
    """True if a stage with n later stages has at most n + 1 micro-batches in flight."""

    @abstractmethod
    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the actions of a device in order.

        The caller must have checked all numbers with `check_supported`.

        Args:
            device: Index of the device.
            num_devices: Number of devices.
            micro_batches: Number of micro-batches.
            chunks: Stages per device.
        """

    def stages_on(self, device: int, num_devices: int, chunks: int) -> tuple[int, ...]:
        """Return the stages that a device runs, in pipeline order.

        Args:
            device: Index of the device.
            num_devices: Number of devices.
            chunks: Stages per device.
        """
        return stages_on(device, num_devices, chunks, self.placement)

    @property
    def order_texts(self) -> tuple[str, ...]:
        """Action order of each device as text, if the solver or the user made the schedule; else empty."""
        return ()

    def runs_chunks(self, chunks: int) -> bool:
        """Return True if the schedule allows `chunks` stages per device, or if `chunks` is 0 (chosen by the solver)."""
        if self.exact_chunks is not None:
            return chunks in (0, self.exact_chunks)
        return self.is_chunked or chunks in (0, 1)

    def check_supported(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raise UsageError if the schedule cannot run with these numbers.

        Args:
            num_devices: Number of devices.
            micro_batches: Number of micro-batches.
            chunks: Stages per device.

        Raises:
            UsageError: The schedule does not support these numbers.
        """
        if self.exact_chunks is not None and chunks != self.exact_chunks:
            raise UsageError(
                f"{self.name} runs {self.exact_chunks} stages on each device, got {chunks}",
                hint=f"use `--chunks {self.exact_chunks}`",
            )
        if chunks < 1 or (chunks > 1 and not self.is_chunked):
            raise UsageError(
                f"{self.name} runs one stage on each device, got {chunks} chunks",
                hint="use one chunk, or `--schedule interleaved` or `interleaved-zb` with one or more",
            )

    def most_devices(self, micro_batches: int) -> float:
        """Return the largest number of devices that can run with `micro_batches` micro-batches."""
        return inf

    def micro_batch_multiple(self, num_devices: int) -> int:
        """Return a number n: every multiple of n is allowed as the number of micro-batches."""
        return 1

    def in_flight(self, device: int, num_devices: int, micro_batches: int) -> int:
        """Return the largest number of micro-batches in flight on a device, if each device runs one stage.

        Args:
            device: Index of the device.
            num_devices: Number of devices.
            micro_batches: Number of micro-batches.
        """
        waiting = most = 0
        for action in self.order(device, num_devices, micro_batches, chunks=1):
            waiting += KINDS[action.kind].direction
            most = max(most, waiting)
        return most

    def bound_us(self, bounds: ComputeTimeBounds, micro_batches: int, chunks: int) -> float:
        """Return a lower bound of the step time of every partition, in microseconds.

        The bound ignores memory, links, overheads and recomputation.

        Args:
            bounds: Lower bounds of the compute time of one micro-batch.
            micro_batches: Number of micro-batches.
            chunks: Stages per device.
        """
        if self.splits_backward:
            return micro_batches * bounds.pair_us
        # One micro-batch runs through all stages and back. If every device runs one stage, each of the other
        # micro-batches adds the largest backward time of a device.
        one_after_the_other = (micro_batches - 1) * bounds.backward_us if chunks == 1 else 0.0
        return max(micro_batches * bounds.pair_us, bounds.work_us + one_after_the_other)

    def stage_time_limit_us(self, upper_us: float, work_us: float, micro_batches: int) -> float:
        """Return an upper bound of a stage's forward plus backward time, in plans with a shorter step than `upper_us`.

        The stage's time is for one micro-batch, in microseconds.

        Args:
            upper_us: Step time that the plans must beat, in microseconds.
            work_us: Forward plus backward time of a micro-batch in all stages, in microseconds.
            micro_batches: Number of micro-batches.
        """
        return upper_us / micro_batches

    def actions(self, num_devices: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of every device, in order.

        Args:
            num_devices: Number of devices, each with its own action order.
            micro_batches: Number of micro-batches.
            chunks: Stages per device.

        Raises:
            UsageError: The schedule cannot run with these numbers, or there are too many actions to simulate.
        """
        if num_devices * chunks * micro_batches > MOST_ACTIONS:
            raise UsageError(
                f"{num_devices * chunks} stages with {micro_batches} micro-batches are too many to simulate",
                hint=f"stages times micro-batches are at most {MOST_ACTIONS}: use fewer micro-batches",
            )
        self.check_supported(num_devices, micro_batches, chunks)
        return tuple(self.order(device, num_devices, micro_batches, chunks) for device in range(num_devices))
