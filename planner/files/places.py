"""Where a plan's profile stands: paths in files are relative to the file, so that both can move together."""

import os
from pathlib import Path

from planner.core.errors import UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.files.reading import is_replayable


def reference_path(profile_path: str, plan_path: str) -> str:
    """How a plan at `plan_path` refers to its profile: relative to its own folder, so both can move together."""
    if not is_replayable(profile_path):
        return "-"
    if not is_replayable(plan_path):
        return profile_path
    return Path(os.path.relpath(profile_path, Path(plan_path).parent)).as_posix()


def profile_path(plan: Plan, plan_path: str, override: str | None = None) -> str:
    """Where the plan's profile stands: at `override`, if that is said.

    Raises:
        UsageError: Neither that nor the plan names a file.
    """
    if override is not None:
        return override
    if plan.inputs.profile.path == "-":
        raise UsageError(
            "the plan does not say which file its profile is in: it was solved from standard input, or from a value",
            hint="say where the profile is: `--profile FILE`",
        )
    folder = "" if not is_replayable(plan_path) else str(Path(plan_path).parent)
    return os.path.normpath(Path(folder, plan.inputs.profile.path))


def model_path(profile: Profile, folder: str) -> str | None:
    """Where the model's file stands, if the profile in `folder` names one."""
    path = profile.model.source.rpartition(":")[0]
    return os.path.normpath(Path(folder, path)) if path else None


def relocated(source: str, profile_folder: str, folder: str) -> str:
    """`path:entry`, relative to `profile_folder`, as it is from `folder`; absolute paths stay as they are."""
    path, colon, entry = source.rpartition(":")
    if path and not Path(path).is_absolute():
        path = Path(os.path.relpath(Path(profile_folder, path), folder)).as_posix()
    return f"{path}{colon}{entry}"
