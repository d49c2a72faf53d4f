"""Checkpoints of given tensors."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from planner.executor.keep.index import PYTHON, CheckpointIndex, rank_file_name, write_index
from planner.executor.keep.rank_file import write_rank_file
from planner.executor.keep.stored import name_in_rank_file

__all__ = ["write_checkpoint"]


def write_checkpoint(folder: Path, *states: Mapping[str, Tensor], tied: Mapping[str, str] | None = None) -> str:
    """Write a checkpoint with a file for each state dict, whose optimizer has no state; return its path."""
    folder.mkdir(parents=True)
    files = []
    for rank, state in enumerate(states):
        tensors = {name_in_rank_file(name): tensor for name, tensor in state.items()}
        with (folder / rank_file_name(rank)).open("wb") as file:
            files.append(write_rank_file(file, {"optimizer": {}}, tensors))
    holders: dict[str, int | str] = {name: rank for rank, state in enumerate(states) for name in state}
    index = CheckpointIndex(
        step=1,
        seed=0,
        plan_digest="",
        balance=(1,) * len(states),
        torch="",
        python=PYTHON,
        computation={},
        files=tuple(files),
        tensors=holders | dict(tied or {}),
    )
    write_index(folder, index)
    return str(folder)
