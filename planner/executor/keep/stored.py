"""What a folder of `torch.distributed.checkpoint` holds, read so that nothing in it can run code.

torch's own loader unpickles the index (`.metadata`) and whatever is no tensor. Here the index is read as data
(`planner.executor.keep.inert`) and checked before anything is done with it: every class it names is one that an index
is made of, every tensor lies within a file of the folder and has no more elements than that file has bytes for. Tensors
and other values are then read by `torch.load(weights_only=True)`, after the checksums that `torch.save` writes beside
them were compared.
"""

import hashlib
import io
import json
import math
import stat
import zipfile
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, TypeGuard, cast

import torch
from torch import Tensor

from planner.core.errors import FileError
from planner.executor.keep.inert import InertError, Named, Pairs, Record, read_inert

__all__ = ["DESCRIPTION", "INDEX", "StoredFolder", "StoredTensor", "index_digest", "read_folder", "read_safely"]

INDEX = ".metadata"

DESCRIPTION = "checkpoint.json"
"""Of a checkpoint of ours: what it is one of, and the digest of its index, which has no checksum of its own."""

_MOST_PATCHES = 256
"""Pieces of one tensor that is cut along several dimensions; each is compared with each."""

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _STORAGE: {"_StorageInfo"},
    "torch": {"Size", "strided", "contiguous_format"},
    "torch.serialization": {"_get_layout"},
    # The path that the checkpoint had when it was written.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""What an index is made of: names alone, nothing of it is imported for the index."""


def _admits(name: Named) -> bool:
    return name.name in _CLASSES.get(name.module, ()) or (name.module == "torch" and name.name in _DTYPES)


_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that lies in the folder, in one piece or several."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class StoredFolder:
    """The index of a folder.

    Attributes:
        folder: As the user named it.
        tensors: By key.
        paths: Of every key, how to go down the nest of dicts that was saved.
    """

    folder: str
    tensors: dict[str, StoredTensor]
    paths: dict[str, tuple[str | int, ...]]
    _values: dict[str, _Place] = field(repr=False)

    def __contains__(self, key: str) -> bool:
        """Whether something is stored under a key."""
        return key in self.tensors or key in self._values

    def read(self, key: str, into: Tensor) -> None:
        """Copies a stored tensor into one of its shape.

        Raises:
            FileError: It cannot be read.
        """
        for chunk in self.tensors[key].chunks:
            piece = self._load(key, chunk.place)
            if not _is_strided(piece) or tuple(piece.shape) != chunk.sizes or piece.dtype != self.tensors[key].dtype:
                self._fail(key, chunk.place, "it is not the tensor that the index describes")
            target = into.detach()
            for dimension, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dimension, start, size)
            target.copy_(piece)

    def tensor(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        """A stored tensor, new.

        Raises:
            FileError: It cannot be read.
        """
        stored = self.tensors[key]
        made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        self.read(key, made)
        return made

    def value(self, key: str) -> Any:
        """What is stored there and no tensor: numbers, texts, bytes, and nests of them and of tensors.

        Raises:
            FileError: It is not there, or cannot be read.
        """
        if key not in self._values:
            raise FileError(f'lacks "{key}"', path=self.folder)
        return self._load(key, self._values[key])

    def _load(self, key: str, place: _Place) -> Any:
        path = Path(self.folder, place.file)
        try:
            with path.open("rb") as file:
                return read_safely(cast("IO[bytes]", _Slice(file, place.start, place.length)))
        except Exception as error:
            self._fail(key, place, first_line(error))

    def _fail(self, key: str, place: _Place, why: str) -> NoReturn:
        raise FileError(
            f'"{key}" cannot be read: {why}',
            path=str(Path(self.folder, place.file)),
            hint="the file is damaged or was not written by `torch.save`; take another checkpoint",
        )


def read_folder(folder: str) -> StoredFolder:
    """The index of a checkpoint.

    Raises:
        FileError: There is none, or it is damaged, or it points out of the folder or beyond the files' ends.
    """
    path = Path(folder, INDEX)
    try:
        _check_regular(path)
        content = path.read_bytes()
    except OSError as error:
        raise FileError(
            f"is no checkpoint (it has no readable `{INDEX}`: {error.strerror or error})", path=folder
        ) from error
    try:
        _check_digest(folder, content)
        return _checked(folder, read_inert(content, _admits))
    except (InertError, OSError) as error:
        raise FileError(
            f"the index of the checkpoint cannot be read: {error}", path=str(path), hint="take another checkpoint"
        ) from error


def index_digest(folder: str | Path) -> str:
    """SHA-256 of a folder's index."""
    return hashlib.sha256(Path(folder, INDEX).read_bytes()).hexdigest()


def read_safely(file: IO[bytes]) -> Any:
    """What `torch.save` wrote, if it is data and its checksums agree.

    Raises:
        Exception: It is not; of many kinds.
    """
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, as `torch.save` never does")
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


# Private functions


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

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
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a seek before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(wanted)  # type: ignore[attr-defined]  # of a file that is open for reading
        self._at += count
        return int(count)


def _check_digest(folder: str, index: bytes) -> None:
    path = Path(folder, DESCRIPTION)
    if not path.is_file():
        return
    try:
        description = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # who resumes is told; the weights may be whole
    digest = description.get("index_sha256") if isinstance(description, dict) else None
    if digest is not None and digest != hashlib.sha256(index).hexdigest():
        raise InertError(f"it is not the one that {DESCRIPTION} was written for")


def _is_strided(piece: Any) -> bool:
    return isinstance(piece, Tensor) and piece.layout == torch.strided and not piece.is_quantized


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")


def _checked(folder: str, index: Any) -> StoredFolder:
    top = _state(index, "Metadata")
    sizes: dict[str, int] = {}
    places = {}
    for key, value in _pairs(top.get("storage_data")):
        place = _place(_state(value, "_StorageInfo"))
        if place.file not in sizes:
            file = Path(folder, place.file)
            try:
                _check_regular(file)
            except OSError as error:
                raise InertError(f"the file {file} cannot be read: {error.strerror or error}") from error
            sizes[place.file] = file.stat().st_size
        if place.start + place.length > sizes[place.file]:
            raise InertError(f"{place.file} ends before what it should hold: it was cut short")
        index_of = _state(key, "MetadataIndex")
        offset = index_of.get("offset")
        places[_text(index_of.get("fqn")), None if offset is None else _size(offset)] = place
    tensors, values = {}, {}
    for key, value in _pairs(top.get("state_dict_metadata")):
        name = _text(key)
        if _is_a(value, "BytesStorageMetadata"):
            values[name] = _at(places, name, None)
        else:
            tensors[name] = _tensor(name, _state(value, "TensorStorageMetadata"), places)
    paths = {_text(key): _path(value) for key, value in _pairs(top.get("planner_data") or Pairs())}
    return StoredFolder(
        folder=folder,
        tensors=tensors,
        paths={key: path for key, path in paths.items() if key in tensors or key in values},
        _values=values,
    )


Places = dict[tuple[str, tuple[int, ...] | None], _Place]


def _tensor(name: str, state: dict[str, Any], places: Places) -> StoredTensor:
    shape, properties = _size(state.get("size")), state.get("properties")
    if not _is_a(properties, "TensorProperties") or not isinstance(properties.state, tuple) or not properties.state:
        raise InertError(f'"{name}" has no dtype')
    kind = properties.state[0]
    if not isinstance(kind, Named) or kind.module != "torch" or kind.name not in _DTYPES:
        raise InertError(f'"{name}" has the unknown dtype {str(kind)[:80]}')
    dtype = _DTYPES[kind.name]
    listed = state.get("chunks")
    if not isinstance(listed, list):
        raise InertError(f'"{name}" has no chunks')
    chunks = []
    for each in listed:
        chunk = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        place = _at(places, name, offsets)
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits or math.prod(sizes) * dtype.itemsize > place.length:
            raise InertError(f'"{name}" has a chunk that does not fit')
        chunks.append(_Chunk(offsets=offsets, sizes=sizes, place=place))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or _overlap(chunks):
        raise InertError(f'"{name}" is not whole')
    return StoredTensor(shape=torch.Size(shape), dtype=dtype, chunks=tuple(chunks))


def _overlap(chunks: list[_Chunk]) -> bool:
    """Whether two chunks share elements; those that are cut along one dimension only, as usual, by sorting."""
    held = [chunk for chunk in chunks if 0 not in chunk.sizes]
    cut = (
        {d for d in range(len(held[0].sizes)) if len({(c.offsets[d], c.sizes[d]) for c in held}) > 1} if held else set()
    )
    if len(cut) == 1:
        d = cut.pop()
        held.sort(key=lambda chunk: chunk.offsets[d])
        return any(a.offsets[d] + a.sizes[d] > b.offsets[d] for a, b in pairwise(held))
    if len(held) > _MOST_PATCHES:
        raise InertError("a tensor lies in too many patches")
    return any(_meet(a, b) for a, b in combinations(held, 2))


def _meet(a: _Chunk, b: _Chunk) -> bool:
    return all(
        start < other + length and other < start + size
        for start, size, other, length in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _at(places: Places, name: str, offset: tuple[int, ...] | None) -> _Place:
    place = places.get((name, offset))
    if place is None:
        raise InertError(f'it does not say where "{name}" lies')
    return place


def _place(state: dict[str, Any]) -> _Place:
    file, start, length = _text(state.get("relative_path")), state.get("offset"), state.get("length")
    if Path(file).name != file or file in ("", ".", ".."):
        raise InertError(f"it points out of the folder, to {file[:200]!r}")
    if not _is_count(start) or not _is_count(length):
        raise InertError("a place in a file that is no number")
    if state.get("transform_descriptors"):
        raise InertError("it was written with an extension of torch, which is not read here")
    return _Place(file=file, start=start, length=length)


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, tuple) or not all(isinstance(part, (str, int)) for part in value):
        raise InertError("a path that is none")
    return value


def _pairs(value: Any) -> Pairs:
    if not isinstance(value, Pairs):
        raise InertError("a table is missing")
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise InertError("a name that is no text")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Record) and value.maker == Named(module="torch", name="Size") and len(value.arguments) == 1:
        sizes = value.arguments[0]
        if isinstance(sizes, (tuple, list)) and len(sizes) <= 64 and all(_is_count(size) for size in sizes):
            return tuple(sizes)
    raise InertError("a shape that is none")


def _is_a(value: Any, name: str) -> TypeGuard[Record]:
    module = _STORAGE if name == "_StorageInfo" else _METADATA
    return isinstance(value, Record) and value.maker == Named(module=module, name=name)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not _is_a(value, name):
        raise InertError(f"there is no {name} where one should be")
    return value.state.strings() if isinstance(value.state, Pairs) else {}
