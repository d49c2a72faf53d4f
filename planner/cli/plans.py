"""A plan together with its profile, wherever the plan says it stands."""

import os
from pathlib import Path

from planner.cli.options import integers
from planner.core.costs import costs_at
from planner.core.errors import UsageError
from planner.core.evaluate import Partition, timeline
from planner.core.plan import Plan
from planner.core.planning import cluster_of
from planner.core.profile import Profile
from planner.core.simulate import Event
from planner.emit import SUFFIXES, read_balance_list
from planner.files import read_profile

__all__ = ["cuts", "events_of", "profile_for", "profile_path", "reference_path"]


def reference_path(profile_path: str, plan_path: str) -> str:
    """How a plan at `plan_path` refers to its profile: relative to its own folder, so both can move together."""
    if "-" in (profile_path, plan_path):
        return profile_path
    return Path(os.path.relpath(profile_path, Path(plan_path).parent)).as_posix()


def profile_path(plan: Plan, plan_path: str, override: str | None) -> str:
    """Where the plan's profile stands."""
    if override is not None:
        return override
    if plan.inputs.profile.path == "-":
        raise UsageError("the plan's profile came from standard input", hint="say where it is: `--profile FILE`")
    folder = "" if plan_path == "-" else str(Path(plan_path).parent)
    return os.path.normpath(Path(folder, plan.inputs.profile.path))


def profile_for(plan: Plan, plan_path: str, override: str | None) -> Profile:
    """The plan's profile, read; raises `FileError` if it is not there."""
    return read_profile(profile_path(plan, plan_path, override))


def events_of(plan: Plan, profile: Profile) -> tuple[Event, ...]:
    """Simulated events of one step of the plan."""
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    return timeline(costs, Partition.of(plan, costs.names), cluster_of(plan.inputs))


def cuts(text: str, profile: Profile) -> tuple[int, ...]:
    """`--balance`: `6,6,6,6`, or a file that gives the cuts, of ours or of another engine.

    Raises:
        UsageError: Neither.
        FileError: The file gives no cuts of this profile.
    """
    if text.endswith(SUFFIXES):
        return read_balance_list(text, profile.layers)
    return integers("--balance", text)
