"""What is asked of the solver."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.core.schedule import GIVEN, Listed, Schedule, schedule_of, schedules_for
from planner.core.values.plan import Inputs, Plan

MOST_ACTIONS_OF_AUTO: Final = 1_200_000
"""Some seconds for each schedule."""

MOST_CHUNKS: Final = 4
"""Chunks per device that are tried where the solver may choose; more of them seldom pay for their boundaries."""

Solver = Literal["auto", "dp", "milp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of the solver, beside `Inputs` that the plan records."""

    inputs: Inputs
    micro_batches: int | None = None
    """M, if the user fixed it."""
    balance: tuple[int, ...] | None = None
    """The cuts, if the user fixed them: then they are evaluated, and only M and recomputation are chosen."""
    time_limit_s: float | None = None
    """After which the best plan found is given, with a proven gap."""
    actions: int | None = MOST_ACTIONS_OF_AUTO
    """Effort for each schedule beside GPipe's where the schedule is left open, in actions simulated; None: as much as
    where the schedule is fixed, so that nearly every answer is proven."""
    searches_on: bool = True
    """Whether a plan of several chunks that is not proven is searched on from, for some seconds, where effort is not
    bounded: not where so many questions are asked that only their answers together count."""
    lists: Listed | None = None
    """The schedule, where its lists were given: then `inputs.schedule` is `given`."""
    solver: Solver = "auto"
    """`auto` and `dp` take the dynamic program, `milp` the integer program."""

    @classmethod
    def again(cls, plan: Plan, *, micro_batches: int | None, time_limit_s: float) -> "Request":
        """The question that `plan` answers, with M as it is given, or left open; lists that were given stay."""
        inputs, lists = plan.inputs, schedule_of(plan.schedule, plan.order)
        if inputs.schedule == GIVEN and isinstance(lists, Listed) and lists.rows:
            return cls(inputs=inputs, micro_batches=plan.micro_batches, time_limit_s=time_limit_s, lists=lists)
        if inputs.schedule == GIVEN:
            inputs = replace(inputs, schedule=plan.schedule)
        return cls(inputs=inputs, micro_batches=micro_batches, time_limit_s=time_limit_s)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What there is to choose from."""
        return schedules_for(self.inputs.schedule) if self.lists is None else (self.lists,)
