"""Input of the interactive report: a plan, and the choices that the report offers."""

from dataclasses import dataclass

from planner.core.values.plan import Plan
from planner.core.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerRequest:
    """Plan with figures recomputed from its profile, and the choices that the interactive report offers."""

    plan: Plan
    profile: Profile
    micro_batches: tuple[int, ...]
    """Numbers of micro-batches that the interactive report offers."""
    command: tuple[str, ...]
    """Parts of the `solve` command that computes the plan again, without options that the report can change."""
    place: str = "plan.yaml"
    """Path of the plan file, for the `check` command in the interactive report."""
    caveats: tuple[str, ...] = ()
    """Sentences about options of the plan that `command` lacks."""
    may_recompute: bool = True
    """True if stages of the model give the same results with recomputation."""
