"""What a rank keeps in a checkpoint beside tensors by name: as data, so that reading it cannot run code."""

import io
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planner.core.errors import FileError, UsageError
from planner.executor.keep.stored import StoredFolder, first_line, read_safely

_PLAIN = (
    Tensor,
    nn.Parameter,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.Size,
    torch.dtype,
    torch.device,
)
_NESTS: tuple[type, ...] = (list, tuple, set)
_TABLES: tuple[type, ...] = (dict, OrderedDict, Counter)


def packed(state: Mapping[str, Any]) -> bytes:
    """The bytes of a state that is data.

    Raises:
        UsageError: It holds an object of another kind.
    """
    buffer = io.BytesIO()
    torch.save(as_data(dict(state), "the rank's state"), buffer)
    return buffer.getvalue()


def as_data(value: Any, where: str) -> Any:
    """The same, with NumPy's scalars as Python's.

    Raises:
        UsageError: It holds an object of another kind than data.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return as_data(value.item(), where)
    if type(value) in _TABLES:
        for key in value:
            as_data(key, where)
        for key, held in value.items():
            replaced = as_data(held, f"{where}[{key!r}]")
            if replaced is not held:
                return {k: as_data(v, f"{where}[{k!r}]") for k, v in value.items()}
        return value
    if type(value) in _NESTS:
        return type(value)(as_data(held, f"{where}[{number}]") for number, held in enumerate(value))
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold",
        hint="a `state_dict` of tensors, numbers, texts and nests of them can be read back without running code",
    )


def unpacked_rank(stored: StoredFolder, rank: int) -> dict[str, Any]:
    """Return what `packed` wrote for a rank.

    Raises:
        FileError: It is not there, is damaged, or holds something else than data.
    """
    key = _keys(stored).get(rank)
    if key is None:
        raise FileError(f"lacks the state of rank {rank}", path=stored.folder)
    return _unpacked(stored.value(key), f"{stored.folder}: {key}")


def ranks_beside(stored: StoredFolder, keys: Iterable[str]) -> list[int]:
    """Return the ranks that wrote the tensors under `keys`: those whose states are in the same files."""
    tensors = stored.index.tensors
    files = {chunk.place.file for key in keys if key in tensors for chunk in tensors[key].chunks}
    return [rank for rank, key in _keys(stored).items() if stored.index.values[key].file in files]


def restored(name: str, restore: Callable[[Any], Any], state: Any, path: str) -> None:
    """Gives a part of a run its state back.

    Raises:
        FileError: It does not take it.
    """
    try:
        restore(state)
    except Exception as error:
        raise FileError(
            f"the state of {name} in it cannot be restored: {type(error).__name__}: {first_line(error)}",
            path=path,
            hint="take another checkpoint, or start from its weights alone with `--weights`",
        ) from error


def _keys(stored: StoredFolder) -> dict[int, str]:
    """Return the keys of all ranks' states, by rank."""
    values = stored.index.values
    paths = {key: path for key, path in stored.index.paths.items() if key in values and len(path) == 2}
    return {
        int(path[1]): key
        for key, path in paths.items()
        if path[0] == "ranks" and re.fullmatch(r"\d{1,9}", str(path[1]), re.ASCII)
    }


def _unpacked(held: Any, path: str) -> dict[str, Any]:
    try:
        state = read_safely(io.BytesIO(held))
        groups = state["groups"]
        as_it_was = (
            isinstance(state["others"], dict)
            and isinstance(state["pipeline"], dict)
            and isinstance(state["random"], dict)
            and all(isinstance(names, list) and isinstance(options, dict) for names, options in groups)
            and all(isinstance(name, str) for names, _ in groups for name in names)
        )
    except Exception as error:
        raise FileError(f"cannot be read: {first_line(error)}", path=path, hint="take another checkpoint") from error
    if not as_it_was:
        raise FileError("is not the state of a rank", path=path, hint="take another checkpoint")
    return dict(state)
