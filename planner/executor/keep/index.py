"""The index of a `torch.distributed.checkpoint`: what lies where, checked before anything is done with it.

It was read as data (`planner.executor.keep.inert`), so it may say anything. What is made of it here holds: every class
that it names is one that an index is made of, every tensor lies within a file of the folder, is whole, and has no more
elements than that file has bytes for.
"""

import math
import stat
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, TypeGuard

import torch

from planner.executor.keep.inert import InertError, Named, Pairs, Record, read_inert

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
    # How Python up to 3.11.3 writes a member of an enumeration (Debian 12 has 3.11.2).
    "builtins": {"getattr"},
}
"""What an index is made of: names alone, nothing of it is imported for the index."""


def _admits(name: Named) -> bool:
    return name.name in _CLASSES.get(name.module, ()) or (name.module == "torch" and name.name in _DTYPES)


_DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Bytes of a file: what `torch.save` wrote of one tensor or value."""

    file: str
    start: int
    length: int
    digest: str | None = None
    """`planner.executor.keep.stored.records_digest` of it; None where it was written without."""


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A piece of a tensor: where it begins and how large it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Extent


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that lies in the folder, in one piece or several."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class Index:
    """What lies in a folder."""

    tensors: dict[str, StoredTensor]
    """By key."""
    values: dict[str, Extent]
    """What is no tensor, by key."""
    paths: dict[str, tuple[str | int, ...]]
    """By key, how to go down the nest of dicts that was saved."""


def read_index(folder: str, content: bytes) -> Index:
    """The index of a folder, of what it holds as bytes.

    Raises:
        InertError: It is damaged, or it points out of the folder or beyond the files' ends.
    """
    top = _state(read_inert(content, _admits), "Metadata")
    places = _places(folder, top)
    tensors, values = {}, {}
    for key, value in _pairs(top.get("state_dict_metadata")):
        name = _text(key)
        if _is_a(value, "BytesStorageMetadata"):
            values[name] = _at(places, name, None)
        else:
            tensors[name] = _tensor(name, _state(value, "TensorStorageMetadata"), places)
    paths = {_text(key): _path(value) for key, value in _pairs(top.get("planner_data") or Pairs())}
    # A path that leads to nothing would be a name for something that was never stored.
    return Index(
        tensors=tensors,
        values=values,
        paths={key: path for key, path in paths.items() if key in tensors or key in values},
    )


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes` bytes.

    Raises:
        OSError: It is no regular file, is larger, or cannot be read.
    """
    check_regular(path)
    if path.stat().st_size > most_bytes:
        raise OSError(f"it has more than {most_bytes} bytes, which no such file has")
    with path.open("rb") as file:
        return file.read(most_bytes)


def check_regular(path: Path) -> None:
    """Refuses what is no regular file: reading a pipe or a device might never end.

    Raises:
        OSError: It is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a number of something that a file can have."""
    # Not `isinstance`: a `bool` is an `int`, too.
    return type(value) is int and 0 <= value < 2**63


Extents = dict[tuple[str, tuple[int, ...] | None], Extent]
"""By key, and for a tensor by where the piece begins in it."""


def _places(folder: str, top: dict[str, Any]) -> Extents:
    """Where every piece lies; each within a file of the folder."""
    sizes: dict[str, int] = {}
    places: Extents = {}
    for key, value in _pairs(top.get("storage_data")):
        place = _place(_state(value, "_StorageInfo"))
        # Once for each file: an index may name the same one a million times.
        if place.file not in sizes:
            file = Path(folder, place.file)
            try:
                check_regular(file)
            except OSError as error:
                raise InertError(f"the file {file} cannot be read: {error.strerror or error}") from error
            sizes[place.file] = file.stat().st_size
        if place.start + place.length > sizes[place.file]:
            raise InertError(f"{place.file} ends before what it should hold: it was cut short")
        index_of = _state(key, "MetadataIndex")
        offset = index_of.get("offset")
        places[_text(index_of.get("fqn")), None if offset is None else _size(offset)] = place
    return places


def _tensor(name: str, state: dict[str, Any], places: Extents) -> StoredTensor:
    shape, properties = _size(state.get("size")), state.get("properties")
    if not _is_a(properties, "TensorProperties") or not isinstance(properties.state, tuple) or not properties.state:
        raise InertError(f'"{name}" has no dtype')
    # torch writes the dtype first; what follows (layout, pinned memory, …) is nothing to go by.
    kind = properties.state[0]
    if not isinstance(kind, Named) or kind.module != "torch" or kind.name not in _DTYPES:
        raise InertError(f'"{name}" has the unknown dtype {str(kind)[:80]}')
    dtype = _DTYPES[kind.name]
    # Pieces of several files may make one tensor: each must fit, none may lie in another, together they are all of it.
    listed = state.get("chunks")
    if not isinstance(listed, list):
        raise InertError(f'"{name}" has no chunks')
    chunks = []
    for each in listed:
        chunk = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        place = _at(places, name, offsets)
        # Python's integers do not overflow, and no tensor is made before all of this was looked at.
        fits = len(offsets) == len(sizes) == len(shape) and all(
            start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits or math.prod(sizes) * dtype.itemsize > place.length:
            raise InertError(f'"{name}" has a chunk that does not fit')
        chunks.append(_Chunk(offsets=offsets, sizes=sizes, place=place))
    # As many elements as the tensor, and none twice: so all of it is there.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or _overlap(chunks):
        raise InertError(f'"{name}" is not whole')
    return StoredTensor(shape=torch.Size(shape), dtype=dtype, chunks=tuple(chunks))


def _overlap(chunks: list[_Chunk]) -> bool:
    """Whether two chunks share elements; those that are cut along one dimension only, as usual, by sorting."""
    held = [chunk for chunk in chunks if 0 not in chunk.sizes]  # an empty one shares nothing
    cut = (
        {d for d in range(len(held[0].sizes)) if len({(c.offsets[d], c.sizes[d]) for c in held}) > 1} if held else set()
    )
    # Rows of one matrix, a rank's each: there may be thousands, and comparing all pairs would take seconds.
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


def _at(places: Extents, name: str, offset: tuple[int, ...] | None) -> Extent:
    place = places.get((name, offset))
    if place is None:
        raise InertError(f'it does not say where "{name}" lies')
    return place


def _place(state: dict[str, Any]) -> Extent:
    # A bare name: a path could lead anywhere, `..` out of the folder.
    file, start, length = _text(state.get("relative_path")), state.get("offset"), state.get("length")
    if Path(file).name != file or file in ("", ".", ".."):
        raise InertError(f"it points out of the folder, to {file[:200]!r}")
    if not is_count(start) or not is_count(length):
        raise InertError("a place in a file that is no number")
    if state.get("transform_descriptors"):
        # Compressed or encrypted: bytes that mean something else than a tensor.
        raise InertError("it was written with an extension of torch, which is not read here")
    digest = state.get("digest")
    return Extent(file=file, start=start, length=length, digest=None if digest is None else _text(digest))


def _path(value: Any) -> tuple[str | int, ...]:
    if not isinstance(value, tuple) or not all(isinstance(part, (str, int)) for part in value):
        raise InertError("a path that is none")
    return value


def _pairs(value: Any) -> Pairs:
    if not isinstance(value, Pairs):  # its keys were not hashed, and may come twice: the last one counts
        raise InertError("a table is missing")
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise InertError("a name that is no text")


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Record) and value.maker == Named(module="torch", name="Size") and len(value.arguments) == 1:
        sizes = value.arguments[0]
        # torch takes no more dimensions than 64.
        if isinstance(sizes, (tuple, list)) and len(sizes) <= 64 and all(is_count(size) for size in sizes):
            return tuple(sizes)
    raise InertError("a shape that is none")


def _is_a(value: Any, name: str) -> TypeGuard[Record]:
    # By name alone: the class is neither imported nor made.
    module = _STORAGE if name == "_StorageInfo" else _METADATA
    return isinstance(value, Record) and value.maker == Named(module=module, name=name)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not _is_a(value, name):
        raise InertError(f"there is no {name} where one should be")
    return value.state.strings() if isinstance(value.state, Pairs) else {}
