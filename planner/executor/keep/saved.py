"""Folders of checkpoints: listing, atomic creation and removal, and branches of runs.

A folder named `step-…` is a complete checkpoint. It gets this name after all its content is on disk, and is renamed
before any content is removed. Checkpoints of another branch are moved to `abandoned-…` and never removed.

A run gets a name when it begins, and every checkpoint stores the name of its run. A run that resumes the newest
checkpoint continues this branch. A run that resumes an earlier checkpoint, or saves in another folder, begins a new
branch. Later checkpoints of the old branch do not belong to the new branch.
"""

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from planner.core.errors import FileError
from planner.executor.keep.index import CheckpointIndex, is_checkpoint, read_index, write_index
from planner.files.writing import sync_folder


class NotWrittenError(Exception):
    """Error of a rank that cannot write its part of a checkpoint; the message is the reason."""


@dataclass(frozen=True)
class Lineage:
    """History of a run: the original run, and the branches that led to the current run."""

    branches: tuple[tuple[str, int], ...] = ()
    """Name of each branch, and number of the step after which it began; the first entry is the original run."""

    @classmethod
    def new(cls) -> "Lineage":
        """Return the history of a new run, with a new random name."""
        return cls().new_branch(0)

    @property
    def run(self) -> str:
        """Name of the original run."""
        return self.branches[0][0] if self.branches else ""

    def new_branch(self, step: int) -> "Lineage":
        """Return the history of a new branch, which continues this run after `step` steps."""
        return Lineage((*self.branches, (uuid.uuid4().hex, step)))

    def includes(self, other: "Lineage", step: int) -> bool:
        """Return True if a checkpoint of `other` after `step` steps belongs to this run's history."""
        shared = len(other.branches)
        if self.branches[:shared] != other.branches:
            return False
        return shared == len(self.branches) or step <= self.branches[shared][1]


def latest_checkpoint(folder: str) -> Path | None:
    """Return the latest checkpoint in a folder, or the folder if it is itself a checkpoint; else None."""
    path = Path(folder)
    if is_checkpoint(path):
        return path
    there = checkpoints_in(path)
    return there[-1] if there else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in a folder, oldest first."""
    there = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(there, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(checkpoint.name[5:])


def lineage_of(checkpoint: Path) -> Lineage | None:
    """Return the history of the run that wrote a checkpoint; None if the checkpoint's index cannot be read."""
    try:
        return Lineage(read_index(checkpoint).branches)
    except FileError:
        return None


def partial_path(folder: Path, step: int) -> Path:
    """Return the path of the hidden folder in which a checkpoint is written."""
    return folder / f".step-{step:08d}.partial"


def complete_checkpoint(partial: Path, index: CheckpointIndex) -> None:
    """Complete a checkpoint: write its index, and rename the folder of the rank files to its final name."""
    write_index(partial, index)
    sync_folder(partial)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if target.is_dir():
        set_aside([target])
    partial.rename(target)
    sync_folder(target.parent)


def remove_old_checkpoints(folder: Path, lineage: Lineage, keep: int) -> None:
    """Remove the older checkpoints of a run.

    Args:
        folder: Checkpoint folder.
        lineage: Run whose checkpoints are removed.
        keep: Number of newest checkpoints to keep.
    """
    of_run = [path for path in checkpoints_in(folder) if _is_of(path, lineage)]
    for older in of_run[:-keep]:
        doomed = older.with_name(f".{older.name}.old")
        try:
            older.rename(doomed)
        except OSError:  # the checkpoint is kept
            continue
        shutil.rmtree(doomed, ignore_errors=True)


def foreign_checkpoints(folder: Path, lineage: Lineage) -> list[Path]:
    """Return the checkpoints in a folder that do not belong to a run's history."""
    return [path for path in checkpoints_in(folder) if not _is_of(path, lineage)]


def set_aside(checkpoints: Sequence[Path]) -> Path:
    """Move checkpoints of one folder to a new folder `abandoned-…`, and return its path."""
    folder = checkpoints[0].parent
    aside = next(path for n in count(1) if not (path := folder / f"abandoned-{n}").exists())
    aside.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(aside / checkpoint.name)
    sync_folder(folder)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Remove incomplete checkpoints and remains of removed ones, which an interrupted job left in a folder."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _is_of(checkpoint: Path, lineage: Lineage) -> bool:
    its = lineage_of(checkpoint)
    return its is not None and lineage.includes(its, step_of(checkpoint))
