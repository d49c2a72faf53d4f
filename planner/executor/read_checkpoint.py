"""Read a rank's part of a checkpoint: the index, the rank's state, and the files that contain its tensors.

Under the plan that wrote the checkpoint, a rank reads the index and its own file. Only the first replica's files
contain tensors, so ranks of other replicas also read one of these files. Under another plan, a rank reads the files of
all stages that had its layers, and the first rank's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.core.errors import FileError
from planner.executor.keep.index import CheckpointIndex, check_rank_files, check_same_computation
from planner.executor.keep.optimizer_state import OptimizerState, ParameterGroups
from planner.executor.keep.stored import StoredCheckpoint
from planner.executor.keep.weights import load_weights
from planner.executor.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """State of a checkpoint that one rank restores."""

    index: CheckpointIndex
    optimizer_state: Mapping[str, dict[str, Any]]
    groups: ParameterGroups
    """Parameter groups of the optimizers in all files that this rank opened."""
    state: Mapping[str, Any]
    """Other state: random states, step, loader, and further objects of the script."""
    is_same_plan: bool


def read_checkpoint(source: Path, pipeline: Pipeline, optimizer: OptimizerState) -> CheckpointState:
    """Read this rank's part of a checkpoint, and copy the weights into the model.

    Args:
        source: Checkpoint to read.
        pipeline: Pipeline of this rank.
        optimizer: Optimizer of this rank's parameters.

    Returns:
        State that remains to be restored: optimizer, step, random states, data position and other objects.

    Raises:
        FileError: The checkpoint cannot be read, or is damaged.
        UsageError: The checkpoint does not fit the model.
    """
    stored = StoredCheckpoint(source)
    index, place = stored.index, pipeline.place
    if pipeline.rank == 0:
        check_rank_files(source, index)
    check_same_computation(index, pipeline.code_digests, str(source))
    is_same_plan = (index.balance, len(index.files)) == (pipeline.balance.balance, dist.get_world_size())
    # Under another plan, state that is equal on all ranks (loader, schedules) is taken from the first.
    own = stored.file(pipeline.rank if is_same_plan else 0)
    if is_same_plan:
        stored.file(place.rank_of(place.stages[0], replica=0))  # has all tensors of this rank, including tied ones
    load_weights(stored, pipeline.named_tensors(), pipeline.first_names)
    optimizer_state = optimizer.read_from(stored)
    state = {part: own.state_part(part) for part in ("random", "device_random", "pipeline", "others")}
    if state["pipeline"].get("step_index") != index.step:
        raise FileError("has the state of another step than its index", path=str(source))
    return CheckpointState(
        index=index,
        optimizer_state=optimizer_state,
        groups=[group for file in stored.opened.values() for group in file.state_part("groups")],
        state=state,
        is_same_plan=is_same_plan,
    )
