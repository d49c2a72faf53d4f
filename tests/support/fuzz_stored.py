"""Checkpoints and weights for the fuzzer: valid ones made once, then damaged by bytes or in their index."""

import functools
import io
import json
import random
import tempfile
from pathlib import Path

__all__ = ["prepare", "read_weights", "spoilt_checkpoint", "spoilt_weights"]

_CHECKPOINT = ("checkpoint.json", "rank-00000.safetensors")


@functools.cache
def _whole() -> dict[str, bytes]:
    """Return the files of a checkpoint, and of its weights in each format."""
    import torch
    from safetensors.torch import save

    from tests.support.stored import write_checkpoint

    state = {"a.weight": torch.ones(3, 4), "a.bias": torch.zeros(3).half(), "count": torch.tensor(7)}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "step"), state)
        found = {path.name: path.read_bytes() for path in Path(folder, "step").iterdir()}
    for name, zipped in (("weights.pt", True), ("legacy.pt", False)):
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
        found[name] = buffer.getvalue()
    return {**found, "weights.safetensors": save(state)}


def prepare() -> None:
    """Import what reading them needs, and make the valid files."""
    import planner.executor.keep.weights  # noqa: F401 - for what it imports

    _whole()


def spoilt_checkpoint(draw: random.Random, folder: Path) -> list[str]:
    """Write a damaged checkpoint, and return the command that reads it."""
    place = folder / "step-00000001"
    place.mkdir()
    for name in _CHECKPOINT:
        (place / name).write_bytes(_whole()[name])
    name = draw.choice(_CHECKPOINT)
    way = draw.randrange(6)
    if way == 0:
        (place / name).unlink()
    elif way == 1 and name == "checkpoint.json":
        (place / name).write_text(_other_index(draw, _whole()[name]))
    else:
        (place / name).write_bytes(_spoilt(draw, _whole()[name]))
    return ["export", "step-00000001", "-o", draw.choice(("out.pt", "out.safetensors"))]


def spoilt_weights(draw: random.Random, folder: Path) -> str:
    """Write a damaged weights file, and return its path."""
    name = draw.choice([name for name in _whole() if name not in _CHECKPOINT])
    (folder / name).write_bytes(_spoilt(draw, _whole()[name]))
    return str(folder / name)


def read_weights(path: str) -> None:
    """Load a file into a small model."""
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


def _other_index(draw: random.Random, content: bytes) -> str:
    """Return an index that is valid JSON with other content."""
    index = json.loads(content)
    wrong = (0, -1, 1, 2**63, 10**30, "x", None, 1.5, {}, [], [[]], {"a.weight": "count"}, {"a.weight": [0]})
    target = draw.choice((index, index["files"][0], index["tensors"]))
    target[draw.choice(list(target))] = draw.choice(wrong)
    return json.dumps(index)
