"""Read a rank's part of a checkpoint: the index, the rank's state, and the files that contain its tensors.

Under the plan that wrote the checkpoint, a rank reads the index and its own file. Only the first replica's files
contain the model's tensors, so ranks of other replicas also read one of these files. Under another plan, a rank reads
the files of all stages that had its layers, and the first rank's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from planner.core.errors import FileError, UsageError
from planner.core.values.units import pluralize
from planner.executor.keep.index import CheckpointIndex, check_rank_files, check_same_computation
from planner.executor.keep.optimizer_state import OptimizerState, ParameterGroups
from planner.executor.keep.stored import StoredCheckpoint
from planner.executor.keep.unsaved import EXTRA_STATE
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
    """Other state: random states, step, loader, and other objects of the script."""
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
    load_weights(stored, pipeline.named_tensors(), pipeline.canonical_names)
    optimizer_state = optimizer.read_from(stored)
    saved, present = len(own.state_part("groups")), len(optimizer.parameter_groups())
    if saved != present:
        raise UsageError(
            f"{source}: has the state of an optimizer with {pluralize(saved, 'parameter group')}, but the script's has "
            f"{present}",
            hint="make the same groups before `checkpoints`, also those that the script adds in a later step; or start "
            "a new run from the weights (`--weights`)",
        )
    if not is_same_plan:
        _check_equal_on_all_ranks(stored)
    state = {part: own.state_part(part) for part in ("random", "device_random", "pipeline", "others")}
    if not is_same_plan and EXTRA_STATE in state["others"]:
        state["others"] = {**state["others"], EXTRA_STATE: _extra_state_of_all_modules(stored)}
    if state["pipeline"].get("step_index") != index.step:
        raise FileError("has the state of another step than its index", path=str(source))
    return CheckpointState(
        index=index,
        optimizer_state=optimizer_state,
        groups=[group for file in stored.opened.values() for group in file.state_part("groups")],
        state=state,
        is_same_plan=is_same_plan,
    )


def _check_equal_on_all_ranks(stored: StoredCheckpoint) -> None:
    first: Mapping[str, Any] = stored.file(0).state_part("others")
    for rank, file in stored.opened.items():
        others = file.state_part("others")
        names = {**first, **others}.keys() - {EXTRA_STATE}
        name = next((name for name in sorted(names) if not _is_equal(first.get(name), others.get(name))), None)
        if name is not None:
            raise UsageError(
                f'{stored.folder}: the state of "{name}" differs between ranks 0 and {rank}, so it can be resumed only '
                "under the plan that wrote it",
                hint=f"resume under that plan; to change the plan, keep in {name} only what is equal on every rank, "
                "and state of single parameters in the optimizer or in buffers of the model",
            )


def _extra_state_of_all_modules(stored: StoredCheckpoint) -> dict[str, Any]:
    files = [stored.file(rank) for rank in range(len(stored.index.files))]
    states = [file.state_part("others").get(EXTRA_STATE, {}) for file in files]
    return {path: state for of_rank in reversed(states) for path, state in of_rank.items()}


def _is_equal(one: Any, other: Any) -> bool:
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(map(_is_equal_leaf, leaves, others))


def _is_equal_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 - NaN is equal to NaN here
