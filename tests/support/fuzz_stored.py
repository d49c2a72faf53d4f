"""Checkpoints and weights for the fuzzer: whole ones made once, then spoilt byte by byte or in their index."""

import functools
import io
import json
import pickle
import random
import tempfile
import warnings
from pathlib import Path

__all__ = ["prepare", "read_weights", "spoilt_checkpoint", "spoilt_weights"]


@functools.cache
def _whole() -> dict[str, bytes]:
    """The files of a checkpoint, and of the same weights in the formats that there are."""
    import torch
    from torch.distributed import checkpoint as dcp

    state = {"a.weight": torch.ones(3, 4), "a.bias": torch.zeros(3).half(), "count": torch.tensor(7)}
    nest = {"model": state, "ranks": {"0": b"x"}, "tied": json.dumps({name: name for name in state})}
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(nest, checkpoint_id=folder, no_dist=True)
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    for name, zipped in (("weights.pt", True), ("legacy.pt", False)):
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
        found[name] = buffer.getvalue()
    try:
        from safetensors.torch import save
    except ImportError:
        return found
    return {**found, "weights.safetensors": save(state)}


def prepare() -> None:
    """Imports what reading them needs, and makes the whole ones."""
    import planner.executor.keep.weights  # noqa: F401 - for what it imports

    _whole()


def spoilt_checkpoint(draw: random.Random, folder: Path) -> list[str]:
    """A checkpoint with something wrong, and the command that reads it."""
    place = folder / "step-00000001"
    place.mkdir()
    names = [name for name in _whole() if not name.endswith((".pt", ".safetensors"))]
    for name in names:
        (place / name).write_bytes(_whole()[name])
    name = draw.choice(names)
    way = draw.randrange(6)
    if way == 0:
        (place / name).unlink()
    elif way == 1 and name == ".metadata":
        (place / name).write_bytes(_other_index(draw, _whole()[name]))
    else:
        (place / name).write_bytes(_spoilt(draw, _whole()[name]))
    return ["export", "step-00000001", "-o", draw.choice(("out.pt", "out.safetensors"))]


def spoilt_weights(draw: random.Random, folder: Path) -> str:
    """A weights file with something wrong."""
    name = draw.choice([name for name in _whole() if name.endswith((".pt", ".safetensors"))])
    (folder / name).write_bytes(_spoilt(draw, _whole()[name]))
    return str(folder / name)


def read_weights(path: str) -> None:
    """Loads a file into a small model."""
    import torch

    from planner.executor.keep.weights import load_weights

    tensors = {"a.weight": torch.empty(3, 4), "a.bias": torch.empty(3), "count": torch.tensor(0)}
    load_weights(path, tensors, {name: name for name in tensors})


# Private functions


def _spoilt(draw: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(5):
            case 0:
                data = data[:at]
            case 1:
                data[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 30))))
            case 2:
                del data[at : at + draw.randrange(1, 40)]
            case _ if data:
                data[at] = draw.randrange(256)
    return bytes(data)


def _other_index(draw: random.Random, content: bytes) -> bytes:
    """A pickle that is one, and says something else."""
    import torch

    index = pickle.loads(content)
    numbers = (0, -1, 1, 2**31, 2**63, 10**30, "x", None, 1.5, torch.Size([2**40]), (), [])
    place = draw.choice(list(index.storage_data.values()))
    stored = [each for each in index.state_dict_metadata.values() if hasattr(each, "chunks")]
    tensor = draw.choice(stored)
    target, name = draw.choice(
        (
            *((place, field) for field in ("relative_path", "offset", "length")),
            *((tensor, field) for field in ("size", "chunks", "properties")),
            *((tensor.chunks[0], field) for field in ("offsets", "sizes")),
            *((index, field) for field in ("state_dict_metadata", "planner_data", "storage_data")),
        )
    )
    setattr(target, name, draw.choice(numbers))
    return pickle.dumps(index, protocol=draw.randrange(2, 6))
