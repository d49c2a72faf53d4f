"""Input of the interactive report: a plan, and the choices on offer."""

from dataclasses import dataclass

from planner.core.values.plan import Plan
from planner.core.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Plan as recomputed from its profile, and the alternatives that the page offers."""

    plan: Plan
    profile: Profile
    micro_batches: tuple[int, ...]
    """Numbers of micro-batches that have costs."""
    command: tuple[str, ...]
    """Words of the `solve` command for the plan's request, without options that the page can change."""
    place: str = "plan.yaml"
    """Path of the plan, for the `check` command."""
    caveats: tuple[str, ...] = ()
    """Sentences about parts of the request that the command cannot express."""
    may_recompute: bool = True
    """True if recomputed stages give the same results."""
