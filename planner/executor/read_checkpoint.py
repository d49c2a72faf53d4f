"""What a rank reads of a checkpoint: the index, its own state, and the files that hold its tensors.

Under the plan that wrote it, that is one file besides the index; with replicas or tied weights, which are stored once,
one or two more. Under another plan it is the files of all stages whose layers this rank has now.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.core.errors import FileError
from planner.executor.keep.description import check_same_computation
from planner.executor.keep.optimizer_state import Groups, OptimizerState
from planner.executor.keep.rank_state import ranks_beside, unpacked_rank
from planner.executor.keep.stored import read_folder
from planner.executor.keep.weights import load_weights, model_keys
from planner.executor.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class ReadCheckpoint:
    """State that one rank restores from a checkpoint."""

    description: Mapping[str, Any]
    optimizer_state: Mapping[str, dict[str, Any]]
    groups: Groups
    """Options of the optimizers of the ranks that held this rank's parameters, and of the one it continues from."""
    state: Mapping[str, Any]
    """State of the rank that it continues from."""
    is_same_plan: bool


def read_checkpoint(
    source: Path, description: Mapping[str, Any], pipeline: Pipeline, optimizer: OptimizerState
) -> ReadCheckpoint:
    """Read what this rank needs of a checkpoint; weights are copied into the model at once.

    Args:
        source: The checkpoint.
        description: What it says of itself.
        pipeline: The pipeline.
        optimizer: Of this rank's parameters.

    Raises:
        FileError: It cannot be read, or is damaged.
        UsageError: It does not fit the model.
    """
    check_same_computation(description, pipeline.computation, str(source))
    stored = read_folder(str(source), index_sha256=description.get("index_sha256"))
    is_same_plan = (description["balance"], description["ranks"]) == (
        list(pipeline.balance.balance),
        dist.get_world_size(),
    )
    # Under another plan what is the same on all ranks is taken from the first: the loader, the schedules.
    rank = pipeline.rank if is_same_plan else 0
    tensors, keys = pipeline.named_tensors(), model_keys(stored)
    own = [keys.get(pipeline.first_names[name], "") for name in tensors]
    with stored.kept_open():
        states = {number: unpacked_rank(stored, number) for number in (rank, *ranks_beside(stored, own))}
        optimizer_state = optimizer.stored(stored)
        load_weights(stored, tensors, pipeline.first_names)
    if states[rank]["pipeline"].get("step_index") != description["step"]:
        raise FileError("holds the state after another number of steps than it says", path=str(source))
    return ReadCheckpoint(
        description=description,
        optimizer_state=optimizer_state,
        groups=[group for state in states.values() for group in state["groups"]],
        state=states[rank],
        is_same_plan=is_same_plan,
    )
