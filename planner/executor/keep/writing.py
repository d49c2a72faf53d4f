"""One checkpoint, written with `torch.distributed.checkpoint`.

Torch's part takes a second to import: only runs that save import this module.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.futures
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from planner.executor.keep.saved import NotWrittenError
from planner.executor.keep.stored import records_digest, slice_of
from planner.executor.watch.position import ANY, Position

if TYPE_CHECKING:
    from concurrent.futures import Future

_SYNCED_BYTES = 2**28
"""Bytes between two syncs of a file: what is in the system's memory is not written, and may take minutes more."""


class Writing:
    """A checkpoint that every rank writes its part of; all of them make one.

    Args:
        state: What to write: nested dicts of tensors, strings and numbers.
        folder: A new one.
        group: Of all ranks; None where there is only one.
        in_thread: Whether to return before it is written.
        position: Counts the bytes that this rank writes.

    Raises:
        NotWrittenError: A rank could not write its part.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        folder: Path,
        *,
        group: ProcessGroup | None,
        in_thread: bool,
        position: Position,
    ) -> None:
        # What saves in a thread does so with others; torch 2.8 cannot be told otherwise.
        write: Callable[..., Any] = async_save if in_thread else partial(save, no_dist=group is None)
        writer = _DigestWriter(folder)
        writer.fs = _CountedFiles(position, is_waited_for=not in_thread)
        with warnings.catch_warnings(), _telling():
            warnings.simplefilter("ignore")  # of a group for the CPU beside NCCL, and of one process alone
            written = write(
                dict(state),
                storage_writer=writer,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
            )
        self._pending: Future[Any] | None = written if in_thread else None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._pending is None or self._pending.done()

    def finish(self) -> None:
        """Waits until it is written.

        Raises:
            NotWrittenError: A rank could not write its part.
        """
        if self._pending is not None:
            with _telling():
                self._pending.result()


class _DigestWriter(FileSystemWriter):
    """Writer whose index has a digest of every item, so that a file of another checkpoint is not taken for its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for item in written.value():
            place = item.storage_data
            with Path(self.path, place.relative_path).open("rb") as file:
                # An attribute, as torch has no field for it; its own reader ignores it.
                vars(place)["digest"] = records_digest(slice_of(file, place.offset, place.length))
        return written


class _CountedFiles(FileSystem):
    """Files whose bytes on the disk are counted in a rank's position."""

    def __init__(self, position: Position, *, is_waited_for: bool) -> None:
        self._position, self._is_waited_for = position, is_waited_for

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; while the main thread writes it, this rank waits for no other."""
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        if self._is_waited_for:
            self._position.at("writing a checkpoint")
        with io.BufferedWriter(_CountedFile(path, self._position)) as buffered:
            yield buffered
        if self._is_waited_for:
            self._position.at("a checkpoint", waits_for=ANY)


class _CountedFile(io.FileIO):
    """A file to write, synced every `_SYNCED_BYTES`."""

    def __init__(self, path: str | os.PathLike[str], position: Position) -> None:
        super().__init__(path, "wb")
        self._position = position
        self._unsynced_bytes = 0

    def write(self, data: Any, /) -> int:
        """Write at most `_SYNCED_BYTES`, and return how many were written."""
        count = super().write(memoryview(data).cast("B")[:_SYNCED_BYTES])
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _SYNCED_BYTES:
            os.fdatasync(self.fileno())
            self._unsynced_bytes = 0
        self._position.written_bytes += count
        return count


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        cause: BaseException = next((e for e, _ in error.failures.values()), error)
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise NotWrittenError(str(cause)) from error
