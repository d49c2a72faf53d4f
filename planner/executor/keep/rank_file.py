"""File of one rank in a checkpoint: its tensors in the safetensors format, and its state as JSON in the file's header.

    8 bytes    length of the header
    header     JSON: type, shape and place of every tensor; under `__metadata__`, the rank's `state` as a JSON text
    the rest   the tensors, one after the other

`checkpoint.json` has a SHA-256 digest of the state, and the state has a CRC-32 checksum of every tensor. A file of
another checkpoint is therefore refused when it is opened, and a damaged tensor when it is read. Tensors that are not
read are not checked.

This module writes the file tensor by tensor, so that written bytes can be counted during the write.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import safe_open
from torch import Tensor

from planner.executor.keep.errors import reading_errors, size_of_regular_file
from planner.executor.keep.json_state import from_json
from planner.executor.keep.tensor_bytes import bytes_of, safetensors_type_name

_MOST_HEADER_BYTES = 100_000_000
"""Largest header that the package `safetensors` accepts, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """Size and digest of a rank's file, as listed in `checkpoint.json`."""

    size_bytes: int
    state_sha256: str


class RankFile:
    """Rank's file of a checkpoint, open for reading. It must have the size and digest in `entry`.

    Raises:
        FileError: The file is missing, damaged, or of another checkpoint.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path = path
        with reading_errors(path, ""):
            check_file_size(path, entry)
            self._file = cast("Any", safe_open(path, framework="pt"))
            text = self._file.metadata()["state"]
            if hashlib.sha256(text.encode()).hexdigest() != entry.state_sha256:
                raise ValueError("its state does not match `checkpoint.json`")
            self._state: dict[str, Any] = json.loads(text)
            self._crc32: dict[str, int] = self._state["crc32"]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors in the file."""
        return tuple(self._crc32)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor whose memory is mapped from the file. Copy the tensor before the file is closed.

        Raises:
            FileError: The tensor is missing or damaged.
        """
        with reading_errors(self._path, f'"{name}"'):
            tensor: Tensor = self._file.get_tensor(name)
            if zlib.crc32(bytes_of(tensor)) != self._crc32[name]:
                raise ValueError("its checksum is wrong")
        return tensor

    def state_part(self, part: str) -> Any:
        """Return a part of the rank's state, such as "random".

        Raises:
            FileError: The part is missing or damaged.
        """
        with reading_errors(self._path, f"the state of {part}"):
            return from_json(self._state[part], self._copied)

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter; empty if the parameter has no state.

        Raises:
            FileError: The state is damaged.
        """
        with reading_errors(self._path, f'the optimizer state of "{name}"'):
            return dict(from_json(self._state["optimizer"].get(name, {}), self._copied))

    def _copied(self, name: str) -> Tensor:
        return self.tensor(name).clone()


def write_rank_file(file: BinaryIO, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write a rank's file of a checkpoint.

    Args:
        file: File that is open for writing.
        state: State of the rank, as JSON value.
        tensors: Tensors by name, for which `is_storable` is true.

    Returns:
        Entry of the file in the checkpoint's index.

    Raises:
        ValueError: The state is too large.
    """
    text = json.dumps({**state, "crc32": {name: zlib.crc32(bytes_of(tensor)) for name, tensor in tensors.items()}})
    header: dict[str, Any] = {"__metadata__": {"state": text}}
    # Write tensors of the largest types first, so that every tensor begins at a multiple of its type's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": safetensors_type_name(tensor.dtype),
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    if len(content) > _MOST_HEADER_BYTES:
        raise ValueError(f"the state of a rank has more than {_MOST_HEADER_BYTES} bytes in addition to tensors")
    file.write(struct.pack("<Q", len(content)) + content)
    for _, tensor in ordered:
        file.write(bytes_of(tensor))
    return FileEntry(size_bytes=8 + len(content) + end, state_sha256=hashlib.sha256(text.encode()).hexdigest())


def check_file_size(path: Path, entry: FileEntry) -> None:
    """Check that a file has the size in its entry.

    Raises:
        ValueError: The size differs, or the file is not regular.
        OSError: The file does not exist.
    """
    size = size_of_regular_file(path)
    if size != entry.size_bytes:
        raise ValueError(f"it has {size} bytes instead of {entry.size_bytes}")
