"""Checkpoint folder of a run, shared by all ranks; it belongs to one run, and one job at a time writes to it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from planner.core.errors import FileError, UsageError
from planner.executor.keep.exchange import ValueExchange
from planner.executor.keep.folder_lock import FolderLock
from planner.executor.keep.index import CheckpointIndex, is_checkpoint
from planner.executor.keep.saved import (
    Lineage,
    checkpoints_in,
    foreign_checkpoints,
    latest_checkpoint,
    lineage_of,
    remove_leftovers,
    set_aside,
    step_of,
)


class RunFolder:
    """Checkpoint folder of a run, with one object on every rank.

    The first rank reads and changes the folder, and sends the results to the other ranks.

    Args:
        path: Folder; None if the run saves no checkpoints.
        rank: Rank of this process.
        exchange: Exchange of values between all ranks.
        tell: Function (line, is_warning) that prints a line on the first rank.

    Raises:
        UsageError: Another job writes to the folder, or a rank cannot see it.
        FileError: The folder cannot be created.
    """

    def __init__(
        self, path: str | None, *, rank: int, exchange: ValueExchange, tell: Callable[[str, bool], None]
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.lineage = Lineage.new()
        self._is_first, self._exchange, self._tell = rank == 0, exchange, tell
        self._lock: FolderLock | None = None
        if self.path is not None:
            self._open(self.path)
            self._check_shared(self.path)

    def resumable_checkpoints(self, resume: str | None) -> list[Path]:
        """Return the checkpoints that may be resumed, newest first and equal on every rank; empty for a new run.

        Args:
            resume: A checkpoint, a folder of checkpoints, `auto` for this folder, or None for a new run.

        Raises:
            UsageError: A new run would begin in the folder of another run.
            FileError: There is no checkpoint to resume.
        """
        if resume == "auto" and self.path is None:
            raise UsageError("`--resume auto` needs a checkpoint folder", hint="add `--checkpoint DIR`")
        if resume is None:
            self._check_empty()
            return []
        folder = Path(str(self.path) if resume == "auto" else resume)
        names = ""
        if self._is_first:
            there = checkpoints_in(folder)[::-1]
            if not there or is_checkpoint(folder):
                there = [folder] if latest_checkpoint(str(folder)) else []
            names = "\n".join(map(str, there))
        candidates = [Path(name) for name in self._exchange.value_of_first_rank(names).splitlines()]
        if not candidates and resume != "auto":
            raise FileError("the folder has no checkpoint", path=resume)
        return candidates

    def continue_from(self, source: Path, index: CheckpointIndex) -> None:
        """Continue the run that wrote the checkpoint `source`, or begin a branch of it.

        Raises:
            UsageError: The folder has checkpoints of another run.
            FileError: Checkpoints of another branch cannot be moved.
        """
        if self.path is None:
            return
        written, step = Lineage(index.branches), index.step
        is_newest, problem = "", ""
        if self._is_first:
            there, is_own = checkpoints_in(self.path), source.resolve().parent == self.path.resolve()
            is_newest = "yes" if is_own and step == step_of(there[-1]) else ""
            runs = {its.run for path in there if (its := lineage_of(path)) is not None}
            if not is_own and runs - {written.run}:
                problem = f"{self.path} holds checkpoints of another run than that of {source}"
        problem, is_newest = self._exchange.value_of_first_rank(problem), self._exchange.value_of_first_rank(is_newest)
        if problem:
            raise UsageError(problem, hint="pass another folder to `--checkpoint`")
        self.lineage = written if is_newest else written.new_branch(step)
        if self._is_first:
            self._set_others_aside(self.path)

    def release(self) -> None:
        """Release the lock, so that other jobs may use the folder."""
        if self._lock is not None:
            self._lock.release()

    def _open(self, path: Path) -> None:
        """Create the folder if necessary, lock it, and remove incomplete checkpoints of earlier jobs."""
        problem = ""
        if self._is_first:
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(path)
                remove_leftovers(path)
                if self._lock.warning:
                    self._tell(self._lock.warning, True)
            except OSError as error:
                problem = f"cannot be created: {error.strerror}"
        problem = self._exchange.value_of_first_rank(problem)
        if problem:
            raise FileError(problem, path=str(path))

    def _check_shared(self, path: Path) -> None:
        mark = path / ".shared"
        if self._is_first:
            mark.touch()
        self._exchange.value_of_first_rank("")
        blind = self._exchange.decide("" if mark.exists() else "blind", _first_with_any)
        if blind:
            raise UsageError(
                f"rank {blind} does not see the checkpoint folder of rank 0 ({path})",
                hint="it must be on a file system that all machines share",
            )
        if self._is_first:
            mark.unlink()

    def _check_empty(self) -> None:
        """Raise an error if a new run would begin in a folder with checkpoints of another run."""
        there = checkpoints_in(self.path) if self.path is not None and self._is_first else []
        names = self._exchange.value_of_first_rank(
            " to ".join(dict.fromkeys((there[0].name, there[-1].name))) if there else ""
        )
        if names:
            raise UsageError(
                f"{self.path} holds checkpoints of another run ({names}), but this is a new run",
                hint="continue that run (`--resume auto`), or pass another folder to `--checkpoint`",
            )

    def _set_others_aside(self, path: Path) -> None:
        foreign = foreign_checkpoints(path, self.lineage)
        if not foreign:
            return
        names = ", ".join(checkpoint.name for checkpoint in foreign)
        try:
            aside = set_aside(foreign)
        except OSError as error:
            raise FileError(f"{names} cannot be moved aside: {error.strerror}", path=str(path)) from error
        self._tell(f"moved to {aside}, because this run does not continue them: {names}", False)


def _first_with_any(values: Sequence[str]) -> str:
    """Return the first rank whose value is not empty, as text; empty if all values are empty."""
    return next((str(rank) for rank, value in enumerate(values) if value), "")
