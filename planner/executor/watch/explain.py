"""Descriptions of a failure: stage, activity, memory, and the lines of the user's code."""

import contextlib
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
from planner.device.meter import is_out_of_memory
from planner.executor.watch.activity import RankActivity

MOST_NAMED = 3
"""Largest number of ranks that a message names; further ranks are only counted."""


def error_for_exception(error: BaseException, activity: RankActivity) -> PlannerError:
    """Return the error that reports an exception, with the stage, its activity and the lines of the user's code."""
    root = error
    while root.__cause__ is not None:  # the engine wraps errors of stages
        root = root.__cause__
    who = activity.name or "this rank"
    if is_out_of_memory(root):
        return _out_of_memory(root, who, activity)
    if isinstance(root, SystemExit):
        return TrainingError(
            f"{who} exited {activity.where} (SystemExit: {root})\n{_user_frames(root)}".rstrip(),
            hint="the other stages have ended, too; to end a run early, leave the loop on every rank",
        )
    first = f"{type(root).__name__}: {root}".strip()
    hint = "the other stages have ended, too; fix the error, then restart with `--resume auto`"
    if "modified by an inplace operation" in first:
        hint = (
            "stages run forwards of several micro-batches before the first backward, so `forward` must not write into "
            "a buffer or parameter that backward reads: assign a new tensor to the buffer, instead of `copy_`"
        )
    return TrainingError(f"{who} failed {activity.where}: {first}\n{_user_frames(root)}".rstrip(), hint=hint)


def error_after_exit(other: Mapping[str, Any], activity: RankActivity) -> PlannerError:
    """Return the error that this rank reports if another rank exited with code 0 while this rank waits.

    Args:
        other: Summary of the other rank (`RankActivity.summary`).
        activity: Activity of this rank.
    """
    return TrainingError(
        f"{other['name'] or 'another rank'} exited {other['where']} (SystemExit: 0) "
        f"while {activity.name or 'this rank'} waited {activity.where}",
        hint="to end a run early, leave the loop on every rank; every rank knows the loss",
    )


def error_of_hang(activities: Mapping[int, Mapping[str, Any]], timeout_s: float) -> PlannerError:
    """Return the error that reports a job that hangs for `timeout_s` seconds, from the activities of all ranks.

    The error names at most three ranks that do not wait (the cause), and at most three that wait.
    """
    hint = "raise `--timeout` if this activity needs more time; else inspect the process (py-spy dump)"
    by_time = sorted(activities, key=lambda rank: -activities[rank]["idle_s"])
    culprits = [rank for rank in by_time if activities[rank]["waits_for"] is None]
    waiting = [rank for rank in by_time if activities[rank]["waits_for"] is not None]
    waits = join_with_count(
        [
            f"{name_of_rank(rank, activities)} waits {activities[rank]['where']}"
            for rank in sorted(waiting[:MOST_NAMED])
        ],
        len(waiting),
    )
    if not culprits:
        return TrainingError(f"the stages wait for each other for {timeout_s:g} s: {waits}", hint=hint)
    who = join_with_count(
        [
            f"{name_of_rank(rank, activities)} has been {activities[rank]['where']} "
            f"for {activities[rank]['idle_s']:.0f} s"
            for rank in sorted(culprits[:MOST_NAMED])
        ],
        len(culprits),
    )
    return TrainingError(f"{who}, and holds up the others: {waits}", hint=hint)


def join_with_count(shown: Sequence[str], count: int, separator: str = "; ") -> str:
    """Join the first items of a list, and state how many other items there are.

    Args:
        shown: First items of the list.
        count: Number of all items.
        separator: Text between items.

    Returns:
        Text such as "rank 1; rank 2; 5 others".
    """
    more = [f"{count - len(shown)} others"] if count > len(shown) else []
    return separator.join([*shown, *more])


def name_of_rank(rank: int, activities: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the name of a rank for messages; `rank N` if `activities` has no name for the rank."""
    return str(activities.get(rank, {}).get("name") or f"rank {rank}")


def is_failed_transfer(error: BaseException) -> bool:
    """Return True if a transfer to or from another process failed."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo/", "Connection closed by peer", "NCCL"))
    )


def _out_of_memory(error: BaseException, who: str, activity: RankActivity) -> PlannerError:
    predicted = sum(activity.predicted_bytes.get(stage, 0) for stage in activity.stages)
    beside = f"; the plan predicts a peak of {format_bytes(predicted)}" if predicted else ""
    device = accelerator_in_use()
    allocated_bytes = None if device is None else device.allocated_bytes()
    if allocated_bytes is not None:
        held = f"{format_bytes(allocated_bytes)} allocated"
    else:
        held = f"{format_bytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} in the process"
    return TrainingError(
        f"{who} ran out of memory {activity.where}, with {held}{beside}\n  {str(error).strip().splitlines()[0][:300]}",
        hint="solve again with less memory (`--mem`), a larger reserve (`--reserve`), more micro-batches or "
        "`--recompute always`; other programs on the device also take memory",
    )


def _user_frames(error: BaseException) -> str:
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith((*ours, "<frozen"))]
    # The script only calls the pipeline, so its line is omitted if the model has one.
    of_model = [frame for frame in of_user if Path(frame.filename) != Path(sys.argv[0]).resolve()]
    return "".join(traceback.format_list(of_model or of_user or frames)).rstrip()
