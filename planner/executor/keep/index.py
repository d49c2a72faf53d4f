"""Index of a checkpoint (`checkpoint.json`): data about its run, and the file of each tensor."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from planner.core.errors import FileError, UsageError
from planner.executor.keep.errors import reading_errors, size_of_regular_file
from planner.executor.keep.rank_file import FileEntry, check_file_size
from planner.files import parse_json

INDEX: Final = "checkpoint.json"
_MOST_BYTES: Final = 2**26
"""Largest accepted size of an index, in bytes; an index of 100,000 tensors on 1,000 ranks takes 8 MB."""

PYTHON: Final = ".".join(platform.python_version_tuple()[:2])  # another version may change the digests of the code
"""Major and minor version of Python."""
_COMPUTES: Final = {
    "loss": "the loss function has",
    "layers": "what the layers compute (activations, dropout, their own `forward`) has",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """Content of a checkpoint's index file, `checkpoint.json`."""

    schema: Literal["gpipe-plan/checkpoint/v1"] = "gpipe-plan/checkpoint/v1"
    step: int
    """Number of completed steps."""
    seed: int
    plan_digest: str
    balance: tuple[int, ...]
    torch: str
    python: str
    """Major and minor version of Python in the run that wrote the checkpoint, such as `3.12`."""
    computation: dict[str, str]
    """Digests of the code of the loss function (`loss`) and of the layers (`layers`)."""
    files: tuple[FileEntry, ...]
    """Size and digest of each rank's file."""
    tensors: dict[str, int | str]
    """Rank whose file has the tensor, by name. Further names of a tied tensor map to its first name."""
    digest: str = ""
    """Digest of all other fields, to detect a damaged index."""

    def stored_name(self, name: str) -> str:
        """Return the name under which the tensor `name` is stored: for a tied tensor, the first of its names."""
        place = self.tensors[name]
        return name if isinstance(place, int) else place


def rank_file_name(rank: int) -> str:
    """Return the file name of a rank's part of a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def is_checkpoint(folder: Path) -> bool:
    """Return True if the folder itself is a checkpoint, complete or incomplete."""
    return (folder / INDEX).exists()


def read_index(folder: Path) -> CheckpointIndex:
    """Return the index of a checkpoint.

    Raises:
        FileError: The folder has no index, or the index is damaged or of another format.
    """
    if not (folder / INDEX).exists():
        raise FileError(f"is no checkpoint (it has no {INDEX})", path=str(folder))
    with reading_errors(folder, INDEX):
        size_of_regular_file(folder / INDEX, most_bytes=_MOST_BYTES)
        index = parse_json(CheckpointIndex, (folder / INDEX).read_bytes())
        if index.digest != _digest(index):
            raise ValueError("its digest does not match its content")
        for name in index.tensors:
            rank = index.tensors.get(index.stored_name(name))
            if not isinstance(rank, int) or not 0 <= rank < len(index.files):
                raise ValueError(f'"{name}" is in no file')
    return index


def write_index(folder: Path, index: CheckpointIndex) -> None:
    """Write the index of a checkpoint. All other files of the checkpoint must be complete."""
    with (folder / INDEX).open("w") as file:
        file.write(json.dumps(asdict(replace(index, digest=_digest(index))), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _digest(index: CheckpointIndex) -> str:
    content = json.dumps(asdict(replace(index, digest="")))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def check_rank_files(folder: Path, index: CheckpointIndex) -> None:
    """Check that the file of each rank exists and has the size in the index.

    Raises:
        FileError: A file is missing, or has another size.
    """
    for rank, entry in enumerate(index.files):
        with reading_errors(folder / rank_file_name(rank), ""):
            check_file_size(folder / rank_file_name(rank), entry)


def check_same_computation(index: CheckpointIndex, code_digests: Mapping[str, str], path: str) -> None:
    """Refuse to resume a run if the code of the loss or of the layers has changed.

    Args:
        index: Index of the checkpoint.
        code_digests: Digests of the loss function and of the layers of this run.
        path: Path of the checkpoint, for the message.

    Raises:
        UsageError: The loss or the layers have changed.
    """
    changed = [words for name, words in _COMPUTES.items() if index.computation.get(name) != code_digests[name]]
    if changed and index.python == PYTHON:
        raise UsageError(
            f"{' and '.join(changed)} changed since {path} was written: the run would continue with another model",
            hint=f"undo the change in the model file; or start a new run from the weights only: `--weights {path}`",
        )
