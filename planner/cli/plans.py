"""A plan together with its profile, wherever the plan says it stands."""

import os
from pathlib import Path

from planner.core.costs import costs_at
from planner.core.errors import UsageError
from planner.core.evaluate import Partition, timeline
from planner.core.plan import Plan
from planner.core.planning import cluster_of
from planner.core.profile import Profile
from planner.core.simulate import Event
from planner.core.step import Step, step_of
from planner.files import read_profile

__all__ = ["events_of", "profile_for", "profile_path", "reference_path", "step_of_plan"]


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


def step_of_plan(plan: Plan, profile: Profile) -> Step:
    """One step of the plan drawn out, for pictures and traces."""
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    return step_of(costs, Partition.of(plan, costs.names), cluster_of(plan.inputs))
