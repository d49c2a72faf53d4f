"""Checkpoints as folders: which there are, whether they are whole, and how one comes and goes at once.

What is called `step-…` is whole: it gets that name when all in it is on the disk, and loses it before anything of it is
removed. What belongs to another branch of a run is moved aside into `abandoned-…`, where nobody removes it.

A run gets a name when it begins, and every checkpoint says which run wrote it, so that no run takes another's for its
own. A run that goes on from its newest checkpoint stays what it is. One that goes on from an earlier one, or in another
folder, is a branch of it: what was written after the branching point belongs to another branch, though its steps have
higher numbers.
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
    """A rank could not write its part of a checkpoint: the message is why."""


@dataclass(frozen=True)
class Lineage:
    """The branches that lead to a run, the first of them the run itself as it was begun."""

    branches: tuple[tuple[str, int], ...] = ()
    """Name of each, and after how many steps it began."""

    @classmethod
    def new(cls) -> "Lineage":
        """A run that begins."""
        return cls().branched(0)

    @property
    def run(self) -> str:
        """Name of the run that it all began with."""
        return self.branches[0][0] if self.branches else ""

    def branched(self, step: int) -> "Lineage":
        """A branch that goes on after `step` steps."""
        return Lineage((*self.branches, (uuid.uuid4().hex, step)))

    def includes(self, other: "Lineage", step: int) -> bool:
        """Whether a checkpoint that `other` wrote after `step` steps lies behind this run, and is its own to remove."""
        shared = len(other.branches)
        if self.branches[:shared] != other.branches:
            return False
        return shared == len(self.branches) or step <= self.branches[shared][1]


def latest_checkpoint(folder: str) -> Path | None:
    """`folder` if it is a checkpoint itself, else the latest in it; None if there is none."""
    path = Path(folder)
    if is_checkpoint(path):
        return path
    there = saved_in(path)
    return there[-1] if there else None


def saved_in(folder: Path) -> list[Path]:
    """All checkpoints in a folder, oldest first."""
    there = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(there, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Steps after which it was written."""
    return int(checkpoint.name[5:])


def lineage_of(checkpoint: Path) -> Lineage | None:
    """The run that wrote it; None where it does not say."""
    try:
        return Lineage(read_index(checkpoint).branches)
    except FileError:
        return None


def partial_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder / f".step-{step:08d}.partial"


def commit(partial: Path, index: CheckpointIndex) -> None:
    """Makes what all ranks have written a checkpoint."""
    write_index(partial, index)
    sync_folder(partial)
    target = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if target.is_dir():
        set_aside([target])
    partial.rename(target)
    sync_folder(target.parent)


def prune(folder: Path, lineage: Lineage, keep: int) -> None:
    """Removes all but the newest of a run's own checkpoints."""
    of_run = [path for path in saved_in(folder) if _is_of(path, lineage)]
    for older in of_run[:-keep]:
        doomed = older.with_name(f".{older.name}.old")
        try:
            older.rename(doomed)
        except OSError:  # then it stays
            continue
        shutil.rmtree(doomed, ignore_errors=True)


def others_in(folder: Path, lineage: Lineage) -> list[Path]:
    """Checkpoints that do not lie behind the run."""
    return [path for path in saved_in(folder) if not _is_of(path, lineage)]


def set_aside(checkpoints: Sequence[Path]) -> Path:
    """Moves checkpoints of one folder where they are neither resumed nor removed; where that is."""
    folder = checkpoints[0].parent
    aside = next(path for n in count(1) if not (path := folder / f"abandoned-{n}").exists())
    aside.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(aside / checkpoint.name)
    sync_folder(folder)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Removes what an earlier run left half-written, or half-removed."""
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _is_of(checkpoint: Path, lineage: Lineage) -> bool:
    its = lineage_of(checkpoint)
    return its is not None and lineage.includes(its, step_of(checkpoint))
