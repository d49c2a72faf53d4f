"""Paths in files are relative to the file, so that both can move together; and no command writes over what it reads."""

import os
from collections.abc import Iterable, Mapping
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


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None]) -> None:
    """Refuses outputs that are an input or the same as another output, before anything is computed.

    Outputs are named by their options; `-` is a standard stream, None is nothing.

    Raises:
        UsageError: Two of them are one file, under whatever names.
    """
    read = [path for path in inputs if path is not None and path != "-"]
    written: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or path == "-":
            continue
        shown = path if option == path else f"{option} {path}"
        for other in read:
            if _is_same(path, other):
                raise UsageError(f"`{shown}` would overwrite {other}, which is read", hint="name another file")
        for other_option, other in written.items():
            if _is_same(path, other) and not _is_device(path):
                raise UsageError(f"`{other_option} {other}` and `{shown}` are one file", hint="name two files")
        written[option] = path


def _is_same(path: str, other: str) -> bool:
    try:
        if Path(path).exists() and Path(other).exists():
            return Path(path).samefile(other) and not _is_device(path)
        return Path(path).resolve() == Path(other).resolve()
    except (OSError, ValueError, RuntimeError):  # neither can be opened, which is told where it is tried
        return False


def _is_device(path: str) -> bool:
    """Whether what is written there replaces nothing: /dev/null, a pipe, a terminal."""
    return Path(path).exists() and not Path(path).is_file()
