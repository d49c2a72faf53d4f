"""Weights files of the unpartitioned model. A stage reads only its own tensors.

Names are those of the model's state dict. A tied tensor has several names, and may be stored under any of them.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from planner.core.errors import FileError, UsageError
from planner.executor.keep.errors import first_line_of_error, reading_errors
from planner.executor.keep.index import check_rank_files
from planner.executor.keep.stored import StoredCheckpoint
from planner.files.writing import sync_folder
from planner.model.ghosts import memory_key

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes between which weights are cast, as in torch's `load_state_dict`."""

_NESTED = ("model", "state_dict", "model_state_dict")
"""Keys under which training scripts store the state dict."""


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map each name in a model's state dict to the first name of its tensor. State-dict hooks are not called."""
    first: dict[tuple[Any, ...], str] = {}
    return {
        name: first.setdefault(memory_key(tensor) if tensor.numel() else (name,), name)
        for name, tensor in saved_tensors(model).items()
    }


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name, in the order of the state dict."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def load_weights(
    source: str | StoredCheckpoint,
    tensors: Mapping[str, Tensor],
    first_names: Mapping[str, str],
    whole: nn.Module | None = None,
) -> tuple[str, ...]:
    """Copy the tensors of a stage from a state dict, and return descriptions of the dtype casts.

    Other tensors of the state dict are not read.

    Args:
        source: To start a new run, the path of its weights: a file of `torch.save` or safetensors, or a checkpoint. To
            resume a run, its opened checkpoint, whose tensors may contain NaN.
        tensors: Tensors of the stage, by name in the model.
        first_names: Result of `canonical_names` for the whole model.
        whole: The whole model; its tensors may be on the meta device. Its `load_state_dict` pre-hooks are applied to
            the state dict of a new run. If None, no hooks are applied.

    Returns:
        Descriptions of the casts between floating-point dtypes, such as "float64 to float32", each once.

    Raises:
        FileError: The source cannot be read.
        UsageError: Names are missing or unexpected, shapes differ, a dtype cannot be cast, or a new run would start
            with NaN.
    """
    path = source if isinstance(source, str) else source.folder
    stored = _open_state_dict(source) if isinstance(source, str) else source
    if whole is not None and not isinstance(stored, StoredCheckpoint):
        stored = _after_hooks(whole, stored)
    _check_names(path, stored, first_names, whole)
    # A tied tensor may have another name in the file: both are mapped to its first name.
    name_there = {first_names[name]: name for name in stored}
    # Check all tensors before any is copied. Until then, they are only mapped into memory.
    wanted = {name_there[first_names[name]]: target.detach() for name, target in tensors.items()}
    saved = {name: stored[name] for name in wanted}
    for name, target in wanted.items():
        if saved[name].shape != target.shape:
            raise UsageError(
                f'{path} does not fit the model: "{name}" has shape {list(saved[name].shape)} in the file, '
                f"{list(target.shape)} in the model",
                hint="use the settings with which the weights were made (`gpipe-plan profile --set …`)",
            )
        _check_castable(path, name, saved[name].dtype, target.dtype)
    for name, target in wanted.items():
        with reading_errors(path, f'"{name}"'):
            target.copy_(saved[name])
        _check_range(path, name, saved[name].dtype, target)
        # `isnan` would fail for 8-bit floats, which torch cannot compare.
        if isinstance(source, str) and target.dtype in _FLOATS and target.isnan().any():
            raise UsageError(
                f'{path}: "{name}" contains NaN, so the loss of every step would be NaN',
                hint="the run that wrote the file diverged: use weights from an earlier step",
            )
    casts = {(saved[name].dtype, target.dtype) for name, target in wanted.items()}
    return tuple(sorted(f"{_word(stored)} to {_word(used)}" for stored, used in casts if stored != used))


def export_weights(folder: str, path: str) -> int:
    """Write the weights in the checkpoint `folder` to `path` as one state dict, and return its number of entries.

    Raises:
        FileError: The checkpoint is missing or incomplete, or the file cannot be written.
    """
    stored = StoredCheckpoint(Path(folder))
    check_rank_files(Path(folder), stored.index)
    first = stored.index.stored_name
    first_tensors = {name: stored[name] for name in stored if first(name) == name}
    state = {name: first_tensors[first(name)] for name in stored}
    write_weights(state, path)
    return len(state)


def model_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model. A tied tensor is the same object under all its names."""
    state = {name: tensor.detach().contiguous() for name, tensor in saved_tensors(model).items()}
    return {name: state[first] for name, first in canonical_names(model).items()}


def write_weights(state: dict[str, Tensor], path: str) -> None:
    """Write a state dict to a file atomically.

    The suffix `.safetensors` selects the safetensors format; other files are written with `torch.save`.

    Raises:
        FileError: The file cannot be written.
    """
    partial = f"{path}.partial"
    try:
        if path.endswith(".safetensors"):
            # safetensors refuses tensors that share memory, so store a tied tensor once; the reader ties it again.
            first: dict[int, str] = {}
            save_file({name: t for name, t in state.items() if first.setdefault(id(t), name) == name}, partial)
        else:
            torch.save(state, partial)
        with Path(partial).open("rb+") as file:
            os.fsync(file.fileno())
        if Path(path).is_file():
            Path(partial).chmod(stat.S_IMODE(Path(path).stat().st_mode))
        Path(partial).replace(path)
        sync_folder(Path(path).parent)
    except (OSError, RuntimeError) as error:
        Path(partial).unlink(missing_ok=True)
        raise FileError(f"cannot be written: {error}", path=path) from error


def _open_state_dict(path: str) -> Mapping[str, Tensor]:
    if Path(path).is_dir():
        return StoredCheckpoint(Path(path))
    if not Path(path).is_file():
        raise FileError("no such file or folder", path=path)
    if path.endswith(".safetensors"):
        with reading_errors(path, ""):
            return load_file(path)
    return _load_torch_file(path)


def _load_torch_file(path: str) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise FileError(
            f"cannot be read as weights: {first_line_of_error(error)}",
            path=path,
            hint="save a state dict: `torch.save(model.state_dict(), path)`",
        ) from error
    for key in _NESTED:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise FileError(f"holds a {type(state).__name__}, not a state dict", path=path)
    return {name: tensor for name, tensor in state.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def _after_hooks(whole: nn.Module, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state dict after the model's `load_state_dict` pre-hooks, which may rename its tensors."""
    state = dict(stored)
    try:
        for path, module in whole.named_modules(remove_duplicate=False):
            for hook in module._load_state_dict_pre_hooks.values():
                hook(state, f"{path}." if path else "", {}, True, [], [], [])
    except Exception:  # of a hook that expects the names of `state_dict()`, which an export does not have
        return stored
    return state


def _check_castable(path: str, name: str, stored: torch.dtype, used: torch.dtype) -> None:
    if stored != used and not _FLOATS.issuperset((stored, used)):
        raise UsageError(
            f'{path} does not fit the model: "{name}" is {_word(stored)} in the file, {_word(used)} in the model',
            hint=f"convert it before you save it: `state[name] = state[name].to(torch.{_word(used)})`",
        )


def _check_range(path: str, name: str, stored: torch.dtype, target: Tensor) -> None:
    if stored == target.dtype or torch.finfo(stored).max <= torch.finfo(target.dtype).max:
        return
    if target.isinf().any():
        raise UsageError(f'{path}: "{name}" has numbers beyond the range of {_word(target.dtype)}')


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_names(path: str, stored: Iterable[str], names: Mapping[str, str], whole: nn.Module | None) -> None:
    stored = set(stored)
    there = {names[name] for name in stored if name in names}
    missing = [name for name, first in names.items() if first == name and first not in there]
    unexpected = sorted(stored - set(names))
    if missing or unexpected:
        lacks = [f"it lacks {_some(missing)}"] if missing else []
        holds = [f"holds {_some(unexpected)}, which the model lacks"] if unexpected else []
        has_other_names = whole is not None and whole.state_dict().keys() != saved_tensors(whole).keys()
        raise UsageError(
            f"{path} does not fit the model: {' and '.join(lacks + holds)}",
            hint="hooks of the model change the names in its `state_dict()`: add hooks that change them back "
            "(`register_load_state_dict_pre_hook`), or save the tensors with the names of `named_parameters()` and "
            "`named_buffers()`"
            if has_other_names
            else "the names must be those of the model's own `state_dict()`",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
