"""Writer of one checkpoint: every rank writes its file, and the first rank writes the index."""

import io
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from planner.executor.keep.exchange import ValueExchange
from planner.executor.keep.index import rank_file_name
from planner.executor.keep.rank_file import FileEntry, write_rank_file
from planner.executor.keep.saved import CheckpointNotWrittenError
from planner.executor.watch.activity import STORE, RankActivity

_SYNCED_BYTES = 2**28
"""Bytes between two syncs of a file."""


class RankState(NamedTuple):
    """Data that a rank stores in a checkpoint: state as a JSON value, and tensors by name."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]


class WrittenFile(NamedTuple):
    """File that a rank has written for a checkpoint, with the names of the tensors in the file."""

    entry: FileEntry
    names: tuple[str, ...]


class CheckpointWriter:
    """Writer of one checkpoint. Every rank creates one writer, which begins to write at once.

    Args:
        stored: State and tensors of this rank.
        folder: New folder for the checkpoint. It is removed if a rank cannot write its part.
        exchange: Exchange of values between all ranks.
        in_thread: If true, write in a thread, from a copy of the tensors in host memory.
        activity: Activity of this rank; the bytes written are counted in it.
        rank: Rank of this process.
        publish: Function that completes the checkpoint when all files are written; called on the first rank.
    """

    def __init__(
        self,
        stored: RankState,
        folder: Path,
        *,
        exchange: ValueExchange,
        in_thread: bool,
        activity: RankActivity,
        rank: int,
        publish: Callable[[Sequence[WrittenFile]], None],
    ) -> None:
        self._folder, self._publish = folder, publish
        self._rank, self._activity = rank, activity
        self._pending: Future[str] = Future()
        if in_thread:
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in stored.tensors.items()}
            stored = RankState(stored.state, copied)
            threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = threads.submit(lambda: exchange.decide(self._write_file(stored), self._publish_or_remove))
            threads.shutdown(wait=False)
        else:
            # While the main thread writes, this rank does not wait for other ranks.
            activity.begin("writing a checkpoint")
            report = self._write_file(stored)
            activity.begin("a checkpoint", waits_for=STORE)
            self._pending.set_result(exchange.decide(report, self._publish_or_remove))

    @property
    def is_done(self) -> bool:
        """True if all ranks have written their parts or failed. `wait_until_written` then returns at once."""
        return self._pending.done()

    def wait_until_written(self) -> None:
        """Wait until all ranks have written their parts and the first rank has published the checkpoint.

        Raises:
            CheckpointNotWrittenError: A rank could not write its part. The error is raised on all ranks.
        """
        problem = self._pending.result()
        if problem:
            raise CheckpointNotWrittenError(problem)

    def _write_file(self, stored: RankState) -> dict[str, Any]:
        try:
            self._folder.mkdir(exist_ok=True)
            counted = _CountedFile(self._folder / rank_file_name(self._rank), self._activity)
            with io.BufferedWriter(counted) as file:
                entry = write_rank_file(file, stored.state, stored.tensors)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:  # reported on all ranks
            return {"problem": str(error)}
        return {"entry": asdict(entry), "names": list(stored.tensors)}

    def _publish_or_remove(self, reports: Sequence[dict[str, Any]]) -> str:
        problem = next((str(report["problem"]) for report in reports if "problem" in report), "")
        if not problem:
            try:
                self._publish([WrittenFile(FileEntry(**each["entry"]), tuple(each["names"])) for each in reports])
            except Exception as error:  # reported on all ranks
                problem = str(error)
        if problem:
            # Remove the folder before other ranks get the result, because they may then write a new one of this name.
            shutil.rmtree(self._folder, ignore_errors=True)
        return problem


class _CountedFile(io.FileIO):
    """File for writing that is synced every `_SYNCED_BYTES`. Written bytes are counted in `activity`."""

    def __init__(self, path: Path, activity: RankActivity) -> None:
        super().__init__(path, "wb")
        self._activity = activity
        self._unsynced_bytes = 0

    def write(self, data: Any, /) -> int:
        count = super().write(memoryview(data).cast("B")[:_SYNCED_BYTES])
        self._unsynced_bytes += count
        if self._unsynced_bytes >= _SYNCED_BYTES:
            os.fdatasync(self.fileno())
            self._unsynced_bytes = 0
        self._activity.written_bytes += count
        return count
