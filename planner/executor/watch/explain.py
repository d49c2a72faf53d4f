"""What is said of a failure: which stage, where, with how much memory, and the user's own lines."""

import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.core.errors import PlannerError, TrainingError
from planner.core.values.units import format_bytes
from planner.device.kinds import accelerator_in_use
from planner.executor.watch.position import Position

MOST_NAMED = 3
"""Ranks that a message names; of further ones it gives the number."""


def explained(error: BaseException, position: Position) -> PlannerError:
    """What to say of an exception in this process."""
    root = error
    while root.__cause__ is not None:  # the engine wraps what a stage raises
        root = root.__cause__
    who = position.name or "this rank"
    if _is_out_of_memory(root):
        return _out_of_memory(root, who, position)
    if isinstance(root, SystemExit):
        return TrainingError(
            f"{who} ended itself {position.where} (SystemExit: {root})\n{_frames(root)}".rstrip(),
            hint="the other stages have ended, too; a run that is to end early leaves the loop on every rank alike",
        )
    first = f"{type(root).__name__}: {root}".strip()
    return TrainingError(
        f"{who} failed {position.where}: {first}\n{_frames(root)}".rstrip(),
        hint="the other stages have ended, too; start again with `--resume auto` once it is mended",
    )


def left_alone(left: Mapping[str, Any], position: Position) -> PlannerError:
    """What to say where another rank has `left` as if all were done, and this one still waits."""
    return TrainingError(
        f"{left['name'] or 'another rank'} ended itself {left['where']} (SystemExit: 0) "
        f"while {position.name or 'this rank'} waited {position.where}",
        hint="a run that is to end early leaves the loop on every rank alike; every rank knows the loss",
    )


def hang(positions: Mapping[int, Mapping[str, Any]], timeout_s: float) -> PlannerError:
    """Return what to say of ranks that all wait, and of those that do not; of each, the three of longest."""
    hint = "raise `--timeout` if it needs that long; else look at what it does there (py-spy dump)"
    by_time = sorted(positions, key=lambda rank: -positions[rank]["idle_s"])
    culprits = [rank for rank in by_time if positions[rank]["waits_for"] is None]
    waiting = [rank for rank in by_time if positions[rank]["waits_for"] is not None]
    waits = listed(
        [f"{name_of_rank(rank, positions)} waits {positions[rank]['where']}" for rank in sorted(waiting[:MOST_NAMED])],
        len(waiting),
    )
    if not culprits:
        return TrainingError(f"the stages wait for each other for {timeout_s:g} s: {waits}", hint=hint)
    who = listed(
        [
            f"{name_of_rank(rank, positions)} has been {positions[rank]['where']} for {positions[rank]['idle_s']:.0f} s"
            for rank in sorted(culprits[:MOST_NAMED])
        ],
        len(culprits),
    )
    return TrainingError(f"{who}, and holds up the others: {waits}", hint=hint)


def listed(shown: Sequence[str], count: int, separator: str = "; ") -> str:
    """Return the first of `count` items as a list that says how many more there are."""
    more = [f"{count - len(shown)} others"] if count > len(shown) else []
    return separator.join([*shown, *more])


def name_of_rank(rank: int, positions: Mapping[int, Mapping[str, Any]]) -> str:
    """What a rank called itself."""
    return str(positions.get(rank, {}).get("name") or f"rank {rank}")


def is_lost_contact(error: BaseException) -> bool:
    """Whether it is a transfer that failed."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo/", "Connection closed by peer", "NCCL"))
    )


def _out_of_memory(error: BaseException, who: str, position: Position) -> PlannerError:
    predicted = sum(position.predicted_bytes.get(stage, 0) for stage in position.stages)
    beside = f"; the plan predicts a peak of {format_bytes(predicted)}" if predicted else ""
    device = accelerator_in_use()
    allocated_bytes = None if device is None else device.allocated_bytes()
    if allocated_bytes is not None:
        held = f"{format_bytes(allocated_bytes)} allocated"
    else:
        held = f"{format_bytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} in the process"
    return TrainingError(
        f"{who} ran out of memory {position.where}, with {held}{beside}\n  {str(error).strip().splitlines()[0][:300]}",
        hint="solve again with less memory (`--mem`), more in reserve (`--reserve`), more micro-batches or `--recompute"
        " always`; what else runs on the device counts, too",
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # on the CPU


def _frames(error: BaseException) -> str:
    """The user's own lines in the traceback; all where there are none."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith((*ours, "<frozen"))]
    # The script only calls the pipeline: its line says nothing where there is a line of the model's.
    of_model = [frame for frame in of_user if Path(frame.filename) != Path(sys.argv[0]).resolve()]
    return "".join(traceback.format_list(of_model or of_user or frames)).rstrip()
