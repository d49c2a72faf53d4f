"""Resolve paths that are stored in files, and refuse outputs that would overwrite inputs.

A stored path is relative to the folder of the file that contains it, so that both files can move together.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.core.errors import UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.files.reading import can_be_read_again


def reference_path(profile_path: str, plan_path: str) -> str:
    """Return the profile's path relative to the plan's folder; `-` if the profile is in a pipe or standard input."""
    if not can_be_read_again(profile_path):
        return "-"
    if not can_be_read_again(plan_path):
        return profile_path
    return Path(os.path.relpath(profile_path, Path(plan_path).parent)).as_posix()


def profile_path(plan: Plan, plan_path: str, override: str | None = None) -> str:
    """Return `override` if it is set, else the path of the plan's profile.

    Args:
        plan: The plan.
        plan_path: Path of the plan's file.
        override: Path that replaces the one in the plan.

    Raises:
        UsageError: Neither the plan nor `override` names a file.
    """
    if override is not None:
        return override
    if plan.inputs.profile.path == "-":
        raise UsageError(
            "the plan does not name a profile, because the profile was read from standard input or passed as a value",
            hint="name the profile: `--profile FILE`",
        )
    folder = "" if not can_be_read_again(plan_path) else str(Path(plan_path).parent)
    return os.path.normpath(Path(folder, plan.inputs.profile.path))


def model_path(profile: Profile, folder: str) -> str | None:
    """Return the path of a profile's model file; None if the profile names no file.

    `folder` is the folder of the profile. Paths in the profile are relative to this folder.
    """
    path = profile.model.source.rpartition(":")[0]
    return os.path.normpath(Path(folder, path)) if path else None


def relocate_source(source: str, profile_folder: str, folder: str) -> str:
    """Return the source of a model with its path relative to another folder.

    Args:
        source: Path of a Python file, a colon, and the name of the model in the file. An absolute path is unchanged.
        profile_folder: Folder to which the path in `source` is relative.
        folder: Folder to which the returned path is relative.
    """
    path, colon, entry = source.rpartition(":")
    if path and not Path(path).is_absolute():
        path = Path(os.path.relpath(Path(profile_folder, path), folder)).as_posix()
    return f"{path}{colon}{entry}"


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None]) -> None:
    """Raise UsageError if an output file is also an input or another output, perhaps under another name.

    `outputs` has paths by option. Paths that are `-` (standard output or input) or None are ignored.
    """
    input_paths = [path for path in inputs if path is not None and path != "-"]
    written: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or path == "-":
            continue
        shown = path if option == path else f"{option} {path}"
        for other in input_paths:
            if _is_same(path, other):
                raise UsageError(f"`{shown}` would overwrite {other}, which is an input", hint="name another file")
        for other_option, other in written.items():
            if _is_same(path, other) and not _is_device(path):
                raise UsageError(f"`{other_option} {other}` and `{shown}` are the same file", hint="name two files")
        written[option] = path


def _is_same(path: str, other: str) -> bool:
    try:
        if Path(path).exists() and Path(other).exists():
            return Path(path).samefile(other) and not _is_device(path)
        return Path(path).resolve() == Path(other).resolve()
    except (OSError, ValueError, RuntimeError):  # a path that cannot be opened is reported later
        return False


def _is_device(path: str) -> bool:
    return Path(path).exists() and not Path(path).is_file()
