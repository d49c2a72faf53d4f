"""What a folder of `torch.distributed.checkpoint` holds, read so that nothing in it can run code.

torch's own loader unpickles the index (`.metadata`) and whatever is no tensor. Here the index is read as data and
checked before anything is done with it (`planner.executor.keep.index`). Tensors and other values are then read by
`torch.load(weights_only=True)`, after the checksums that `torch.save` writes beside them were compared.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

import torch
from torch import Tensor

from planner.core.errors import FileError
from planner.executor.keep.index import Extent, Index, read_bounded, read_index
from planner.executor.keep.inert import InertError
from planner.files.bounds import MAX_BYTES

INDEX = ".metadata"

DESCRIPTION = "checkpoint.json"
"""A checkpoint of ours says there what it is one of, and the digest of its index, which has no checksum of its own."""

_MOST_OPEN = 16
_MOST_INDEX_BYTES = MAX_BYTES
"""A tensor takes about 250 bytes of an index."""
_MOST_DESCRIPTION_BYTES = 2**22
"""A rank takes about 30 bytes of a description; JSON can take 20 times its size in memory."""


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """A folder whose index was checked."""

    folder: str
    """Its path, in the user's words."""
    index: Index
    _kept: dict[str, BinaryIO] = field(default_factory=dict)
    """Open files by name."""
    _closes: list[ExitStack] = field(default_factory=list)
    """Stack that closes these files; empty outside of `kept_open`."""

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Open each file once within the block: on a file system of many machines that takes time."""
        with ExitStack() as closes:
            self._closes.append(closes)
            try:
                yield
            finally:
                self._closes.clear()
                self._kept.clear()

    def __contains__(self, key: str) -> bool:
        """Whether something is stored under a key."""
        return key in self.index.tensors or key in self.index.values

    def read(self, key: str, into: Tensor) -> None:
        """Copies a stored tensor into one of its shape.

        Raises:
            FileError: It cannot be read.
        """
        stored = self.index.tensors[key]
        # Piece by piece, so that no tensor is there twice as a whole.
        for chunk in stored.chunks:
            piece = self._load(key, chunk.place)
            # The file may say something else than the index: nothing is read on the word of either alone.
            if not _is_strided(piece) or tuple(piece.shape) != chunk.sizes or piece.dtype != stored.dtype:
                self._fail(key, chunk.place, "it is not the tensor that the index describes")
            target = into.detach()  # written into as a parameter is loaded: autograd has no say in it
            for dimension, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dimension, start, size)
            target.copy_(piece)

    def tensor(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        """A stored tensor, new.

        Raises:
            FileError: It cannot be read.
        """
        stored = self.index.tensors[key]
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        self.read(key, tensor)
        return tensor

    def value(self, key: str) -> Any:
        """What is stored there and no tensor: numbers, texts, bytes, and nests of them and of tensors.

        Raises:
            FileError: It is not there, or cannot be read.
        """
        if key not in self.index.values:
            raise FileError(f'lacks "{key}"', path=self.folder)
        return self._load(key, self.index.values[key])

    def _load(self, key: str, place: Extent) -> Any:
        try:
            with self._opened(place.file) as file:
                return read_safely(slice_of(file, place.start, place.length), digest=place.digest)
        except Exception as error:
            self._fail(key, place, first_line(error))

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        if name in self._kept:
            yield self._kept[name]
            return
        with ExitStack() as closes:
            file = closes.enter_context(Path(self.folder, name).open("rb"))
            # A checkpoint has a file per rank, and only as many may be open as the system allows.
            if self._closes and len(self._kept) < _MOST_OPEN:
                self._kept[name] = file
                self._closes[0].push(closes.pop_all())
            yield file

    def _fail(self, key: str, place: Extent, why: str) -> NoReturn:
        raise FileError(
            f'"{key}" cannot be read: {why}',
            path=str(Path(self.folder, place.file)),
            hint="the file is damaged or was not written by `torch.save`; take another checkpoint",
        )


def read_folder(folder: str, *, index_sha256: str | None = None) -> StoredFolder:
    """The index of a checkpoint.

    Args:
        folder: The checkpoint.
        index_sha256: SHA-256 of the index, where the caller has the description; else it is read.

    Raises:
        FileError: There is none, or it is damaged, or it points out of the folder or beyond the files' ends.
    """
    path = Path(folder, INDEX)
    try:
        content = read_bounded(path, _MOST_INDEX_BYTES)
    except OSError as error:
        raise FileError(
            f"is no checkpoint (it has no readable `{INDEX}`: {error.strerror or error})", path=folder
        ) from error
    try:
        _check_digest(content, _described_digest(folder) if index_sha256 is None else index_sha256)
        return StoredFolder(folder=folder, index=read_index(folder, content))
    except (InertError, OSError) as error:
        raise FileError(
            f"the index of the checkpoint cannot be read: {error}", path=str(path), hint="take another checkpoint"
        ) from error


def read_description(folder: str | Path) -> Any:
    """Return what `checkpoint.json` in a folder holds, whatever it is.

    Raises:
        OSError: There is none, it is no regular file, or it is too large.
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(read_bounded(Path(folder, DESCRIPTION), _MOST_DESCRIPTION_BYTES))


def index_digest(folder: str | Path) -> str:
    """SHA-256 of a folder's index."""
    return hashlib.sha256(Path(folder, INDEX).read_bytes()).hexdigest()


def slice_of(file: BinaryIO, start: int, length: int) -> IO[bytes]:
    """Return a part of a file that is open for reading, as a file."""
    return cast("IO[bytes]", _Slice(file, start, length))


def records_digest(file: IO[bytes]) -> str:
    """Return a digest of what `torch.save` wrote: SHA-256 of the names, sizes and CRC-32 of its records.

    Only the archive's directory is read, so that it takes no time for large tensors. `read_safely` compares the
    records with the same CRC-32.

    Raises:
        zipfile.BadZipFile: It is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        return _digest_of(archive)


def _digest_of(archive: zipfile.ZipFile) -> str:
    records = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def read_safely(file: IO[bytes], *, digest: str | None = None) -> Any:
    """Return what `torch.save` wrote, if it is data, its checksums agree, and it has the `records_digest` given.

    Raises:
        Exception: It is not; of many kinds.
    """
    with zipfile.ZipFile(file) as archive:
        if digest is not None and _digest_of(archive) != digest:
            raise ValueError("its checksums are not those that the index has: the file is of another checkpoint")
        # Compressed, a small file could ask for any amount of memory.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, as `torch.save` never does")
        # torch does not look at checksums when it loads.
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of `{damaged}` in it is wrong")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def first_line(error: BaseException) -> str:
    """What an error says first, without torch's advice to load with `weights_only=False`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Weights only load failed"):
        return next(
            (line.partition("WeightsUnpickler error: ")[2] for line in lines if "WeightsUnpickler error" in line),
            "it holds more than data",
        )
    return lines[0] if lines else type(error).__name__


class _Slice(io.RawIOBase):
    """A part of a file, as a file: all tensors that a rank wrote lie in one, each as `torch.save` writes it."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        # Ends are those of the slice: a zip archive is read from its end.
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a seek before the beginning")
        self._at = base + offset
        return self._at

    # `read` of the base class goes by way of this, and zipfile and torch ask for nothing else.
    def readinto(self, buffer: Any, /) -> int:
        # Never beyond the slice, whatever the archive in it says of its length.
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(wanted)  # type: ignore[attr-defined]  # of a file that is open for reading
        self._at += count
        return int(count)


def _check_digest(index: bytes, digest: str | None) -> None:
    # Only where the description has one: folders of others, and of version 1, are read as they are.
    if digest is not None and digest != hashlib.sha256(index).hexdigest():
        raise InertError(f"it is not the one that {DESCRIPTION} was written for")


def _described_digest(folder: str) -> Any:
    """Return the digest of the index that the description has; None for folders of others, and of version 1."""
    try:
        description = read_description(folder)
    except (OSError, ValueError, RecursionError):
        return None  # `described` reports it where a run is resumed; the weights may be whole
    return description.get("index_sha256") if isinstance(description, dict) else None


def _is_strided(piece: Any) -> bool:
    # Sparse and quantized tensors are data, too, but copying them could take more than they have bytes.
    return isinstance(piece, Tensor) and piece.layout == torch.strided and not piece.is_quantized
