"""Input of the interactive report: a plan, and the choices that the page offers."""

from dataclasses import dataclass

from planner.core.values.plan import Plan
from planner.core.values.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerRequest:
    """Plan with figures recomputed from its profile, and the choices that the page offers."""

    plan: Plan
    profile: Profile
    micro_batches: tuple[int, ...]
    """Numbers of micro-batches whose micro-batch size the profile covers."""
    command: tuple[str, ...]
    """Words of the `solve` command for the plan's request, without options that the page can change."""
    place: str = "plan.yaml"
    """Path of the plan file, for the `check` command on the page."""
    caveats: tuple[str, ...] = ()
    """Sentences about parts of the request that the command cannot express."""
    may_recompute: bool = True
    """True if stages of the model give the same results with recomputation."""
