"""`checkpoint.json`: what a checkpoint is one of, and whether a run that goes on still computes the same."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from planner.core.errors import FileError, UsageError
from planner.executor.keep.index import is_count
from planner.executor.keep.stored import DESCRIPTION, read_description

CHECKPOINT_SCHEMA = "gpipe-plan/checkpoint/v2"
"""Version 1 kept the state of a rank as a pickle, which is no longer read."""

PYTHON: Final = ".".join(platform.python_version_tuple()[:2])
"""The digests are of code as Python reads it, which may be another in its next version."""
_COMPUTES: Final = {
    "loss": "the loss function has",
    "layers": "what the layers compute (activations, dropout, their own `forward`) has",
}


def described(source: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, whatever its version.

    Raises:
        FileError: It is none of a run.
    """
    try:
        description = read_description(source)
        description["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"is no checkpoint of a run (no readable {DESCRIPTION})",
            path=str(source),
            hint="to start from weights alone pass `--weights`",
        ) from error
    return dict(description)


def description_of(source: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, with every field that a run goes by.

    Raises:
        FileError: It is none of a run, of another version, or a field is not what it should be.
    """
    description = described(source)
    schema = description["schema"]
    if schema != CHECKPOINT_SCHEMA:
        raise FileError(
            f"has schema {str(schema)[:100]!r}, not {CHECKPOINT_SCHEMA}",
            path=str(source),
            hint="to start from its weights alone pass `--weights`",
        )
    if not all(is_count(description.get(name)) for name in ("step", "ranks")):
        raise FileError(f"{DESCRIPTION} in it does not say how many steps and ranks", path=str(source))
    bad = [name for name, is_right in _FIELDS.items() if not is_right(description.get(name))]
    if bad:
        raise FileError(f'"{bad[0]}" in its {DESCRIPTION} is not what it should be', path=str(source))
    return description


def check_same_computation(description: Mapping[str, Any], computation: Mapping[str, str], source: str) -> None:
    """Refuses to go on from `source` with another loss, or other layers, that have the same tensors.

    Raises:
        UsageError: It is another one.
    """
    saved = description.get("computation", computation)  # checkpoints of earlier versions say nothing
    what = [words for name, words in _COMPUTES.items() if saved[name] != computation[name]]
    if what and description.get("python") == PYTHON:
        raise UsageError(
            f"{' and '.join(what)} changed since {source} was written: the run would go on with another model",
            hint=f"undo the change in the model file; or begin a new run with the weights alone: `--weights {source}`",
        )


def _is_branches(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(branch, list) and len(branch) == 2 and isinstance(branch[0], str) and is_count(branch[1])
        for branch in value
    )


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        Path(name).name == name and name not in ("", ".", "..") and is_count(size) for name, size in value.items()
    )


def _is_computation(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("loss", "layers"))


_FIELDS = {
    "balance": lambda value: isinstance(value, list) and all(map(is_count, value)),
    "branches": _is_branches,
    "files": _is_files,
    "computation": _is_computation,
}
