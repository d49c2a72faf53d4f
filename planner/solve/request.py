"""Request to the solver."""

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from planner.core.schedule import GIVEN, ListedSchedule, Schedule, schedule_of, schedules_for
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.solve.deadline import UNWATCHED, SearchObserver

MOST_ACTIONS_OF_AUTO: Final = 400_000
"""Actions to simulate per schedule in the first pass of an open schedule: about a second."""

Solver = Literal["auto", "dp", "milp"]


def fix_widths(inputs: Inputs, plan: Plan, profile: Profile) -> Inputs:
    """Return a request for short searches: if the profile has several widths, with T and R of the plan."""
    if not profile.widths:
        return inputs
    return replace(inputs, tensor_parallel=plan.tensor_parallel, replicas=plan.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Inputs of a plan, and options of the search that the plan does not record."""

    inputs: Inputs
    micro_batches: int | None = None
    """M, if it is fixed."""
    balance: tuple[int, ...] | None = None
    """Layers per stage, if the cuts are fixed; the solver then chooses only M and recomputation."""
    time_limit_s: float | None = None
    """Seconds after which the search returns the best plan found, with its gap."""
    actions: int | None = MOST_ACTIONS_OF_AUTO
    """Number of actions to simulate per schedule other than GPipe, in the first pass, if the schedule is `auto`. None:
    as many as for a fixed schedule, so that nearly every answer is proven optimal."""
    searches_on: bool = True
    """True to search the nearest schedules a second time if the schedule is `auto`, and to improve the best plans of
    several chunks for some more seconds. Callers that solve many requests switch it off."""
    lists: ListedSchedule | None = None
    """Schedule with given action orders; then `inputs.schedule` is `given`."""
    watch: SearchObserver = field(default=UNWATCHED, compare=False)
    """Observer of the search, which may stop it."""
    solver: Solver = "auto"
    """Solver: `auto` and `dp` use the dynamic program, `milp` the integer program."""

    @classmethod
    def of_plan(cls, plan: Plan, *, micro_batches: int | None, time_limit_s: float) -> "Request":
        """Return the request that `plan` answers; given action orders are kept.

        Args:
            plan: The plan.
            micro_batches: M; None to leave it open.
            time_limit_s: Time limit of the search in seconds.

        Returns:
            The request.
        """
        inputs, lists = plan.inputs, schedule_of(plan.schedule, plan.order)
        if inputs.schedule == GIVEN and isinstance(lists, ListedSchedule) and lists.rows:
            return cls(inputs=inputs, micro_batches=plan.micro_batches, time_limit_s=time_limit_s, lists=lists)
        if inputs.schedule == GIVEN:
            inputs = replace(inputs, schedule=plan.schedule)
        return cls(inputs=inputs, micro_batches=micro_batches, time_limit_s=time_limit_s)

    def in_one_pass(self) -> "Request":
        """Return the request without a second search pass if its schedule is `auto`; otherwise the request."""
        return replace(self, searches_on=False) if self.inputs.schedule == "auto" else self

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules to choose from."""
        return schedules_for(self.inputs.schedule) if self.lists is None else (self.lists,)
