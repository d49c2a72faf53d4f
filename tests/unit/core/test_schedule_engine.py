"""Action orders compared with torch over a grid of sizes, including interleaved chunks.

The engine's own loop runs on stages that only record calls, so the executed order is compared. For the interleaved
schedule, `pipeline_order` is compared too.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _ComputationType,
    _PipelineSchedule,
)

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import ScheduleName

KINDS = {_ComputationType.FORWARD: "F", _ComputationType.FULL_BACKWARD: "B"}
DEVICES = range(1, 9)
MOST_CHUNKS = 4
MOST_MICRO_BATCHES = 26  # three rounds of eight devices, and then some


class SilentStage:
    """Stub of `PipelineStage` that records forwards and backwards in `calls` as (kind, i, stage)."""

    submod = None

    def __init__(self, stage_index: int, *, num_stages: int, num_devices: int, calls: list[tuple[str, int, int]]):
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_size, self.group_rank = num_devices, stage_index % num_devices
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.calls = calls

    def forward_one_chunk(self, i: int, *_args: Any, **_kwargs: Any) -> None:
        self.calls.append(("F", i, self.stage_index))

    def backward_one_chunk(self, i: int, **_kwargs: Any) -> None:
        self.calls.append(("B", i, self.stage_index))

    def no_operations(self, _i: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations

    def nothing(self, *_args: Any) -> None:
        """Accept transfers within a device and scaling of gradients."""

    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = perform_reduce_grad = nothing


def engine_of(
    schedule: ScheduleName,
    num_devices: int,
    micro_batches: int,
    chunks: int,
    *,
    device: int = 0,
    calls: list[Any] | None = None,
) -> Any:
    """Return the engine's schedule of one device."""
    stages: list[Any] = [
        SilentStage(
            chunk * num_devices + device,
            num_stages=chunks * num_devices,
            num_devices=num_devices,
            calls=[] if calls is None else calls,
        )
        for chunk in range(chunks)
    ]
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, micro_batches)
    return (ScheduleGPipe if schedule == "gpipe" else Schedule1F1B)(stages[0], micro_batches)


def executed(
    schedule: ScheduleName, num_devices: int, micro_batches: int, chunks: int = 1
) -> list[list[tuple[str, int, int]]]:
    """Return the calls of the engine's loop per device."""
    rows = []
    for device in range(num_devices):
        calls: list[tuple[str, int, int]] = []
        engine: _PipelineSchedule = engine_of(schedule, num_devices, micro_batches, chunks, device=device, calls=calls)
        initialize = "_initialize_stages" if schedule == "interleaved" else "_initialize_stage"
        with mock.patch.multiple(engine, **dict.fromkeys((initialize, "_maybe_compute_loss"), mock.DEFAULT)):
            engine._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        rows.append(calls)
    return rows


def ours(
    schedule: ScheduleName, num_devices: int, micro_batches: int, chunks: int = 1
) -> list[list[tuple[str, int, int]]]:
    """Return our action orders in the same form."""
    rows = SCHEDULES[schedule].actions(num_devices, micro_batches, chunks)
    return [[(a.kind, a.micro_batch, a.stage) for a in row] for row in rows]


def engine_refuses(schedule: ScheduleName, num_devices: int, micro_batches: int, chunks: int = 1) -> bool:
    """Return True if the engine's constructor raises."""
    try:
        engine_of(schedule, num_devices, micro_batches, chunks)
    except ValueError:
        return True
    return False


def accepted(num_devices: int) -> Iterator[tuple[int, int]]:
    """Yield (M, V) that the engine can interleave."""
    for chunks, micro_batches in product(range(1, MOST_CHUNKS + 1), range(1, MOST_MICRO_BATCHES + 1)):
        if not engine_refuses("interleaved", num_devices, micro_batches, chunks):
            yield micro_batches, chunks


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_equal_the_executed_order_of_torch(schedule: ScheduleName, num_devices: int) -> None:
    fewest = num_devices if schedule == "1f1b" else 1
    for micro_batches in range(fewest, MOST_MICRO_BATCHES + 1):
        assert ours(schedule, num_devices, micro_batches) == executed(schedule, num_devices, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
def test_interleaved_equals_the_announced_order_of_torch(num_devices: int) -> None:
    tried = 0
    for micro_batches, chunks in accepted(num_devices):
        order = engine_of("interleaved", num_devices, micro_batches, chunks).pipeline_order
        announced = [
            [(KINDS[a.computation_type], a.microbatch_index, a.stage_index) for a in order[device] if a is not None]
            for device in range(num_devices)
        ]
        assert ours("interleaved", num_devices, micro_batches, chunks) == announced
        tried += 1
    assert tried >= 40


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_interleaved_equals_the_executed_order_of_torch(num_devices: int) -> None:
    for micro_batches, chunks in ((1, 2), (3, 3), (num_devices, 2), (2 * num_devices, 1), (3 * num_devices, 4)):
        if not engine_refuses("interleaved", num_devices, micro_batches, chunks):
            engine = executed("interleaved", num_devices, micro_batches, chunks)
            assert ours("interleaved", num_devices, micro_batches, chunks) == engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_sizes_are_refused_exactly_if_torch_refuses_them(schedule: ScheduleName, chunks: int) -> None:
    refused = 0
    for num_devices, micro_batches in product(DEVICES, range(1, 41)):
        size = {"num_devices": num_devices, "micro_batches": micro_batches, "chunks": chunks}
        if engine_refuses(schedule, num_devices, micro_batches, chunks):
            refused += 1
            with pytest.raises(UsageError, match=rf"M = {micro_batches}, K = {num_devices}\b") as error:
                SCHEDULES[schedule].actions(**size)
            assert "`--" in error.value.hint
        else:
            SCHEDULES[schedule].actions(**size)
    assert (refused > 0) == (schedule != "gpipe")


def test_suggested_number_of_micro_batches_can_be_interleaved() -> None:
    offered = 0
    for num_devices, micro_batches in product(DEVICES, range(1, 41)):
        try:
            SCHEDULES["interleaved"].actions(num_devices, micro_batches, 2)
        except UsageError as error:
            fewer = int(error.hint.split("`--micro-batches ")[1].split("`")[0])
            assert num_devices <= fewer < micro_batches
            assert not engine_refuses("interleaved", num_devices, fewer, 2)
            offered += 1
    assert offered > 50


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_chunks_need_the_interleaved_schedule(schedule: ScheduleName) -> None:
    with pytest.raises(UsageError, match=rf"{schedule} .*2 chunks") as refused:
        SCHEDULES[schedule].actions(2, 4, 2)
    assert "interleaved" in refused.value.hint
    with pytest.raises(UsageError, match="0 chunks"):
        SCHEDULES["interleaved"].actions(2, 4, 0)
