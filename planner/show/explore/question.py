"""What the explorer is asked to show: a plan, with what there is to choose from."""

from dataclasses import dataclass

from planner.core.values.plan import Plan
from planner.core.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan as its profile gives it, and what may be chosen in its place."""

    plan: Plan
    profile: Profile
    micro_batches: tuple[int, ...]
    """The M that there are costs for."""
    command: tuple[str, ...]
    """The command that asks the plan's question, without what the page can change."""
    place: str = "plan.yaml"
    """Where the plan stands, as `check` is told."""
    caveats: tuple[str, ...] = ()
    """What the command leaves out, in sentences."""
    may_recompute: bool = True
    """Whether stages that are recomputed come out the same."""
