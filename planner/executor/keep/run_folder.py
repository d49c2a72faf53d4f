"""Checkpoint folder of a run, shared by all ranks. It belongs to one run, and one job at a time writes to it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from planner.core.errors import FileError, UsageError
from planner.executor.keep.exchange import ValueExchange
from planner.executor.keep.folder_lock import FolderLock
from planner.executor.keep.index import is_checkpoint
from planner.executor.keep.saved import (
    checkpoints_in,
    latest_checkpoint,
    move_aside,
    no_checkpoint_error,
    remove_incomplete_checkpoints,
    step_of,
)


class RunFolder:
    """Checkpoint folder of a run. Every rank creates one `RunFolder`.

    The first rank reads and changes the folder, and sends the results to the other ranks.

    Args:
        path: Path of the folder; None if the run saves no checkpoints.
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
        self._is_first, self._exchange, self._tell = rank == 0, exchange, tell
        self._lock: FolderLock | None = None
        if self.path is not None:
            self._create_and_lock(self.path)
            self._check_shared(self.path)

    def resumable_checkpoints(self, resume: str | None) -> list[Path]:
        """Return the checkpoints that may be resumed, newest first; empty for a new run.

        `resume` is a checkpoint, a folder of checkpoints, `auto` for this folder, or None for a new run. The result is
        equal on every rank.

        Raises:
            UsageError: A new run would begin in the folder of another run.
            FileError: There is no checkpoint to resume.
        """
        if resume == "auto" and self.path is None:
            raise UsageError("`--resume auto` needs a checkpoint folder", hint="add `--checkpoint DIR`")
        if resume is None:
            self._check_empty("this is a new run")
            return []
        folder = Path(str(self.path) if resume == "auto" else resume)
        there: list[Path] = []
        if self._is_first:
            there = checkpoints_in(folder)[::-1]
            if not there or is_checkpoint(folder):
                there = [folder] if latest_checkpoint(str(folder)) else []
        candidates = [Path(name) for name in self._exchange.value_of_first_rank([str(path) for path in there])]
        if not candidates and resume != "auto":
            raise no_checkpoint_error(resume)
        return candidates

    def continue_from(self, source: Path, step: int) -> None:
        """Prepare the folder for a run that continues the checkpoint `source`, which has completed `step` steps.

        Checkpoints that were written after step `step` are moved to a folder `abandoned-…`.

        Raises:
            UsageError: The folder has checkpoints, and `source` is in another folder.
            FileError: Later checkpoints cannot be moved.
        """
        if self.path is None:
            return
        if source.resolve().parent != self.path.resolve():
            self._check_empty(f"this run continues {source}")
        if self._is_first:
            self._set_aside([path for path in checkpoints_in(self.path) if step_of(path) > step])

    def release_lock(self) -> None:
        """Release the lock, so that other jobs may use the folder."""
        if self._lock is not None:
            self._lock.release()

    def _create_and_lock(self, path: Path) -> None:
        problem = ""
        if self._is_first:
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(path)
                remove_incomplete_checkpoints(path)
                if self._lock.warning:
                    self._tell(self._lock.warning, True)
            except FileExistsError:
                problem = "is a file, a folder for checkpoints is needed"
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
        blind = self._exchange.decide(mark.exists(), lambda seen: seen.index(False) if not all(seen) else None)
        if blind is not None:
            raise UsageError(
                f"rank {blind} does not see the checkpoint folder of rank 0 ({path})",
                hint="it must be on a file system that all machines share",
            )
        if self._is_first:
            mark.unlink()

    def _check_empty(self, run: str) -> None:
        there = checkpoints_in(self.path) if self.path is not None and self._is_first else []
        names = self._exchange.value_of_first_rank(
            " to ".join(dict.fromkeys((there[0].name, there[-1].name))) if there else ""
        )
        if names:
            raise UsageError(
                f"{self.path} holds checkpoints of another run ({names}), but {run}",
                hint="continue that run (`--resume auto`), or pass another folder to `--checkpoint`",
            )

    def _set_aside(self, checkpoints: Sequence[Path]) -> None:
        if not checkpoints:
            return
        names = ", ".join(checkpoint.name for checkpoint in checkpoints)
        try:
            aside = move_aside(checkpoints)
        except OSError as error:
            raise FileError(f"{names} cannot be moved aside: {error.strerror}", path=str(self.path)) from error
        self._tell(f"moved to {aside}, because this run does not continue them: {names}", False)
