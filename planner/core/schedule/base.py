"""What a schedule is: a value that names itself, says what it cannot run, and lists what every device does.

    K   devices in a pipeline
    M   micro-batches of a step
    V   stages that each device runs, its chunks, placed as `planner.core.values.placement` says

A new schedule is a module with a class like those beside this one, and its name in `planner.core.schedule.SCHEDULES`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of work for one micro-batch on one stage."""

    stage: int
    """Place in the chain."""
    kind: Letter
    micro_batch: int

    def __str__(self) -> str:
        """`2F3` is the forward of micro-batch 3 on stage 2, as in torch's schedule files."""
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def from_text(cls, text: str) -> "Action | None":
        """The action that a text like `2F3` names; None if it names none. Numbers have nine digits at most."""
        match = _ACTION.fullmatch(text)
        return None if match is None else cls(int(match[1]), _LETTERS[match[2]], int(match[3]))


class Loads(NamedTuple):
    """What one micro-batch costs at least, in microseconds, wherever the chain is cut."""

    work_us: float
    """Forward and backward of the whole chain on the fastest device."""
    forward_us: float
    """Forward on the device that has most of it."""
    backward_us: float
    """Backward on the device that has most of it."""
    pair_us: float
    """Both on the device that has most of them together."""


class Schedule(ABC):
    """The order in which devices run the forwards and backwards of a step."""

    name: ClassVar[ScheduleName]
    """What options and files call it."""
    title: ClassVar[str]
    """What the literature calls it."""
    torch_name: ClassVar[str]
    """What torch calls it: `torch.distributed.pipelining.schedules.get_schedule_class` takes that; empty if none."""
    is_chunked: ClassVar[bool] = False
    """Whether a device may run several stages."""
    exact_chunks: ClassVar[int | None] = None
    """How many stages a device runs where no other number works: two arms of a V."""
    placement: ClassVar[Placement] = "loop"
    """Which these are."""
    is_forwards_first: ClassVar[bool] = False
    """Whether all forwards of a step come before its first backward on every device."""
    is_to_be_made: bool = False
    """Whether its lists are yet to be made, for the stages that the solver cuts."""
    splits_backward: ClassVar[bool] = False
    """Whether backwards come in halves, I and W, all or some of them."""
    has_closed_form: ClassVar[bool] = False
    """Whether `planner.core.cost.step_time` tells its step without walking through it."""
    has_known_moments: ClassVar[bool] = False
    """Whether `planner.core.cost.moments.stage_moments` tells what a stage holds without walking through it."""
    is_one_forward_one_backward: ClassVar[bool] = False
    """Whether a stage with n stages behind it lets at most n + 1 micro-batches wait for their backward."""

    @abstractmethod
    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """What `device` does, one thing after the other; the numbers have been checked by `refuse`."""

    def stages_on(self, device: int, num_devices: int, chunks: int) -> tuple[int, ...]:
        """The stages that `device` runs, by chunk."""
        return stages_on(device, num_devices, chunks, self.placement)

    @property
    def texts(self) -> tuple[str, ...]:
        """Per device what it does as text, of a schedule that was made for one pipeline; else empty."""
        return ()

    def runs_chunks(self, chunks: int) -> bool:
        """Whether devices may run so many stages each; 0 is any number that works."""
        if self.exact_chunks is not None:
            return chunks in (0, self.exact_chunks)
        return self.is_chunked or chunks in (0, 1)

    def refuse(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raises where the schedule cannot run so.

        Args:
            num_devices: K.
            micro_batches: M.
            chunks: V.

        Raises:
            UsageError: It cannot.
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
        """How many devices a pipeline of so many micro-batches may have."""
        return inf

    def round_size(self, num_devices: int) -> int:
        """M must be a multiple of this where it is larger."""
        return 1

    def in_flight(self, device: int, num_devices: int, micro_batches: int) -> int:
        """Most micro-batches that wait on `device` for their backward, where each device runs one stage."""
        waiting = most = 0
        for action in self.order(device, num_devices, micro_batches, chunks=1):
            waiting += KINDS[action.kind].direction
            most = max(most, waiting)
        return most

    def bound_us(self, loads: Loads, micro_batches: int, chunks: int) -> float:
        """Below the step time of every partition: memory, links, overheads and recomputation cost nothing here.

        The busiest device works without a pause; and where every device runs one stage, all micro-batches but one wait
        for the slowest backward while the other passes through all stages and back. Nobody waits for the second half of
        a backward: schedules with halves are only held to the first.
        """
        if self.splits_backward:
            return micro_batches * loads.pair_us
        one_after_the_other = (micro_batches - 1) * loads.backward_us if chunks == 1 else 0.0
        return max(micro_batches * loads.pair_us, loads.work_us + one_after_the_other)

    def longest_us(self, upper_us: float, work_us: float, micro_batches: int) -> float:
        """Forward and backward of a micro-batch that no stage exceeds in a step shorter than `upper_us`.

        Args:
            upper_us: The step time to beat.
            work_us: Forward and backward of a micro-batch through all stages.
            micro_batches: M.
        """
        return upper_us / micro_batches

    def actions(self, num_devices: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[Action, ...], ...]:
        """What every device does, in order.

        Args:
            num_devices: K: as many lists are returned.
            micro_batches: M.
            chunks: V.

        Raises:
            UsageError: The schedule cannot run so, or there are too many actions to look at each.
        """
        if num_devices * chunks * micro_batches > MOST_ACTIONS:
            raise UsageError(
                f"{num_devices * chunks} stages with {micro_batches} micro-batches are more than is simulated",
                hint=f"stages times micro-batches are at most {MOST_ACTIONS}: use fewer micro-batches",
            )
        self.refuse(num_devices, micro_batches, chunks)
        return tuple(self.order(device, num_devices, micro_batches, chunks) for device in range(num_devices))
