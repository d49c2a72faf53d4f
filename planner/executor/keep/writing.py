"""One checkpoint, written in the format of `torch.distributed.checkpoint`, without a process group.

Every rank writes a file, and the first rank the index of all. Torch's part takes a second to import: only runs that
save import this module.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from planner.executor.keep.exchange import Exchange
from planner.executor.keep.saved import NotWrittenError
from planner.executor.keep.stored import records_digest, slice_of
from planner.executor.watch.position import STORE, Position

_SYNCED_BYTES = 2**28
"""Bytes between two syncs of a file: what is in the system's memory is not written, and may take minutes more."""

_Item = dict[str, Any]
"""A tensor or value in a file, as JSON."""


class Writing:
    """A checkpoint that every rank writes its part of; all of them make one.

    Args:
        state: What this rank stores: nested dicts of tensors, bytes and strings. Of what two ranks store under the
            same key, the lower rank's counts.
        folder: A new one; it is removed where a rank cannot write its part.
        exchange: Of all ranks.
        in_thread: Whether to return before it is written, with a copy of the tensors in the host's memory.
        position: Counts the bytes that this rank writes.
        rank: Of this process.
        publish: Makes a checkpoint of what all ranks have written; called on the first rank.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        folder: Path,
        *,
        exchange: Exchange,
        in_thread: bool,
        position: Position,
        rank: int,
        publish: Callable[[], None],
    ) -> None:
        self._folder, self._exchange, self._publish = folder, exchange, publish
        self._writer = _Writer(folder, rank, _CountedFiles(position, is_waited_for=not in_thread))
        self._pending: Future[str] = Future()
        if in_thread:
            copied = _copied(state)
            threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._pending = threads.submit(self._write, copied)
            threads.shutdown(wait=False)
        else:
            self._pending.set_result(self._write(state))

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._pending.done()

    def finish(self) -> None:
        """Waits until all ranks have written their parts, and the first has published the checkpoint.

        Raises:
            NotWrittenError: One could not; on all ranks alike.
        """
        problem = self._pending.result()
        if problem:
            raise NotWrittenError(problem)

    def _write(self, state: Mapping[str, Any]) -> str:
        """Return why a rank could not write its part; nothing where all did."""
        try:
            report: dict[str, Any] = {"items": self._writer.write(state)}
        except Exception as error:  # reported on all ranks
            report = {"problem": _reason(error)}
        return self._exchange.decided(json.dumps(report), self._finished)

    def _finished(self, reports: Sequence[str]) -> str:
        parts = [json.loads(report) for report in reports]
        problem = next((str(part["problem"]) for part in parts if "problem" in part), "")
        if not problem:
            try:
                self._writer.write_index([item for part in parts for item in part["items"]])
                self._publish()
            except Exception as error:  # reported on all ranks
                problem = _reason(error)
        if problem:
            # Before the others hear of it, and perhaps write into a new folder of that name.
            shutil.rmtree(self._folder, ignore_errors=True)
        return problem


class _Writer(FileSystemWriter):
    """Writer of one rank's file, and of an index that has a digest of every item.

    With the digest, a file of another checkpoint is not taken for its own.
    """

    def __init__(self, folder: Path, rank: int, files: FileSystem) -> None:
        super().__init__(folder)
        self.fs = files
        self._rank = rank
        self._sample: WriteResult | None = None

    def write(self, state: Mapping[str, Any]) -> list[_Item]:
        """Write what this rank stores, and return what is where."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), self.storage_meta(), is_coordinator=True)
        self.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([self.prepare_local_plan(planner.create_local_plan())])
        # The number of a plan is that in the file's name.
        plan = self.prepare_global_plan(plans * (self._rank + 1))[self._rank]
        results = self.write_data(planner.finish_plan(plan), planner).value()
        self._sample = results[0]
        return [self._item(result, metadata) for result in results]

    def write_index(self, items: Sequence[_Item]) -> None:
        """Write the index of what all ranks have written."""
        first: dict[str, _Item] = {}
        for item in items:
            first.setdefault(item["key"], item)
        metadata = Metadata(
            state_dict_metadata={key: _stored_as(item) for key, item in first.items()},
            planner_data={key: tuple(item["path"]) for key, item in first.items()},
        )
        self.finish(metadata, [[self._result(item) for item in first.values()]])

    def _item(self, result: WriteResult, metadata: Metadata) -> _Item:
        key, place = result.index.fqn, result.storage_data
        stored = metadata.state_dict_metadata[key]
        with Path(self.path, place.relative_path).open("rb") as file:
            digest = records_digest(slice_of(file, place.offset, place.length))
        item = {
            "key": key,
            "path": list((metadata.planner_data or {})[key]),
            "place": [place.relative_path, place.offset, place.length, digest],
        }
        if isinstance(stored, TensorStorageMetadata):
            item |= {"dtype": str(stored.properties.dtype).removeprefix("torch."), "shape": list(stored.size)}
        return item

    def _result(self, item: _Item) -> WriteResult:
        assert self._sample is not None
        name, offset, length, digest = item["place"]
        place = replace(self._sample.storage_data, relative_path=name, offset=offset, length=length)
        vars(place)["digest"] = digest  # an attribute, as torch has no field for it; its own reader ignores it
        origin = torch.Size([0] * len(item["shape"])) if "shape" in item else None
        return WriteResult(index=MetadataIndex(item["key"], origin), size_in_bytes=length, storage_data=place)


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
            self._position.at("a checkpoint", waits_for=STORE)


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


def _stored_as(item: _Item) -> TensorStorageMetadata | BytesStorageMetadata:
    if "shape" not in item:
        return BytesStorageMetadata()
    shape = torch.Size(item["shape"])
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    properties = TensorProperties(dtype=getattr(torch, item["dtype"]))
    return TensorStorageMetadata(properties=properties, size=shape, chunks=[whole])


def _copied(state: Any) -> Any:
    """Return nested dicts and lists with copies of all tensors in the host's memory."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_copied, state))
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
