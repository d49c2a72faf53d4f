"""Folders of checkpoints: listing, atomic creation and removal.

A folder named `step-…` is a complete checkpoint. It gets this name after all its content is on disk. To remove a
checkpoint, its folder first gets a hidden name. If a run resumes an earlier checkpoint, later ones are moved to
`abandoned-…` and never removed.
"""

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from planner.core.errors import FileError
from planner.executor.keep.index import CheckpointIndex, is_checkpoint, write_index
from planner.files.writing import sync_folder


class CheckpointNotWrittenError(Exception):
    """Error for a rank that cannot write its part of a checkpoint. The message is the reason."""


def latest_checkpoint(folder: str) -> Path | None:
    """Return the folder if it is a checkpoint, otherwise the latest checkpoint in it; None if it has no checkpoint."""
    path = Path(folder)
    if is_checkpoint(path):
        return path
    there = checkpoints_in(path)
    return there[-1] if there else None


def no_checkpoint_error(folder: str) -> FileError:
    """Return the error for a path that has no checkpoint."""
    path = Path(folder)
    message = "the folder has no checkpoint" if path.is_dir() else "is a file" if path.is_file() else "no such folder"
    hint = "give a checkpoint, or a folder of checkpoints; train.py writes them with `--checkpoint DIR`"
    return FileError(message, path=folder, hint=hint)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first."""
    there = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(there, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(checkpoint.name[5:])


def partial_checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the hidden folder in which a checkpoint is written."""
    return folder / f".step-{step:08d}.partial"


def complete_checkpoint(partial: Path, index: CheckpointIndex) -> None:
    """Complete a checkpoint: write its index, and rename the folder `partial` to its final name."""
    write_index(partial, index)
    sync_folder(partial)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    partial.rename(target)
    sync_folder(target.parent)


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all checkpoints in a folder except the `keep` newest ones."""
    for older in checkpoints_in(folder)[:-keep]:
        doomed = older.with_name(f".{older.name}.old")
        try:
            older.rename(doomed)
        except OSError:  # the checkpoint is kept
            continue
        shutil.rmtree(doomed, ignore_errors=True)


def move_aside(checkpoints: Sequence[Path]) -> Path:
    """Move checkpoints of one folder to a new folder `abandoned-…`, and return the new folder's path."""
    folder = checkpoints[0].parent
    aside = next(path for n in count(1) if not (path := folder / f"abandoned-{n}").exists())
    aside.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(aside / checkpoint.name)
    sync_folder(folder)
    return aside


def remove_incomplete_checkpoints(folder: Path) -> None:
    """Remove the checkpoints that an interrupted job has written or removed only in part."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
