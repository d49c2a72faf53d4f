"""Every other engine that a plan can be taken to."""

from collections.abc import Callable
from typing import Final

from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit.deepspeed import emit_deepspeed
from planner.emit.device_map import emit_device_map
from planner.emit.layout import EngineFile, Layout
from planner.emit.megatron import emit_megatron
from planner.emit.split_spec import emit_split_spec
from planner.emit.torchgpipe import emit_torchgpipe
from planner.emit.torchtitan import emit_torchtitan

__all__ = ["ENGINES", "emit_engine"]

ENGINES: Final[dict[str, Callable[[Layout], EngineFile]]] = {
    "torchgpipe": emit_torchgpipe,
    "torch": emit_split_spec,
    "torchtitan": emit_torchtitan,
    "deepspeed": emit_deepspeed,
    "megatron": emit_megatron,
    "device-map": emit_device_map,
}
"""By the name of the format."""


def emit_engine(name: str, plan: Plan, profile: Profile) -> EngineFile:
    """`plan` in the format called `name`, one of `ENGINES`.

    Args:
        name: Of the format.
        plan: The plan.
        profile: The profile it was made from: names of all layers.

    Raises:
        UsageError: The format cannot hold the plan at all, or the plan does not cut the profile's chain.
    """
    return ENGINES[name](Layout.of(plan, profile))
