"""Request to the solver."""

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from planner.core.schedule import GIVEN, ListedSchedule, Schedule, allowed_schedules, schedule_of
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.solve.deadline import UNWATCHED, SearchObserver

MOST_ACTIONS_OF_AUTO: Final = 400_000
"""Number of actions simulated per schedule in the first search pass if the schedule is `auto`: about a second."""

Solver = Literal["auto", "dp", "milp"]


def limited_to_plan_width(inputs: Inputs, plan: Plan, profile: Profile) -> Inputs:
    """Return `inputs` limited to the plan's tensor-parallel width and replicas, if the profile has several widths.

    With a single width, `inputs` are returned as they are, so that a search may choose other replicas.

    Args:
        inputs: Inputs of a request.
        plan: Plan whose width and replicas to keep.
        profile: Profile of one or several widths.
    """
    if not profile.widths:
        return inputs
    return replace(inputs, tensor_parallel=plan.tensor_parallel, replicas=plan.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request to the solver: inputs that a plan stores, and options of the search that it does not store."""

    inputs: Inputs
    micro_batches: int | None = None
    """Number of micro-batches, M, if it is fixed; None to let the solver choose it."""
    balance: tuple[int, ...] | None = None
    """Layers per stage, if the cuts are fixed; the solver then chooses only M and recomputation."""
    time_limit_s: float | None = None
    """Seconds after which the search returns the best plan found, with its gap."""
    actions: int | None = MOST_ACTIONS_OF_AUTO
    """Number of actions to simulate per schedule in the first search pass, if the schedule is `auto`. None for the
    default limits of the searches."""
    searches_longer: bool = True
    """True to improve the best plans for some more seconds."""
    lists: ListedSchedule | None = None
    """Schedule with action orders that the user gave; `inputs.schedule` is then `given`."""
    watch: SearchObserver = field(default=UNWATCHED, compare=False)
    """Callbacks of the search, which may stop it."""
    solver: Solver = "auto"
    """Solver: `auto` and `dp` use the dynamic program, `milp` the integer program."""

    @classmethod
    def of_plan(cls, plan: Plan, *, micro_batches: int | None, time_limit_s: float) -> "Request":
        """Return the request that a plan answers. Action orders that the user gave are kept.

        Args:
            plan: The plan.
            micro_batches: Number of micro-batches, or None to let the solver choose it; ignored if the user gave action
                orders.
            time_limit_s: Time limit of the search in seconds.
        """
        inputs, lists = plan.inputs, schedule_of(plan.schedule, plan.order)
        if inputs.schedule == GIVEN and isinstance(lists, ListedSchedule) and lists.rows:
            return cls(inputs=inputs, micro_batches=plan.micro_batches, time_limit_s=time_limit_s, lists=lists)
        if inputs.schedule == GIVEN:
            inputs = replace(inputs, schedule=plan.schedule)
        return cls(inputs=inputs, micro_batches=micro_batches, time_limit_s=time_limit_s)

    def without_longer_search(self) -> "Request":
        """Return this request without the second, longer search of an `auto` schedule."""
        return replace(self, searches_longer=False) if self.inputs.schedule == "auto" else self

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules that the solver may choose from."""
        return allowed_schedules(self.inputs.schedule) if self.lists is None else (self.lists,)
