"""Schedules with split backwards, compared with the order that torch announces for each device.

Torch's schedules are built without processes, around stages that never run.
"""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, SPLITTING

ENGINE: dict[str, type[_PipelineScheduleRuntime]] = {
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
DEVICES = range(1, 9)
MICRO_BATCHES = (*range(1, 27), 32, 40, 64)


def stage_of(index: int, num_stages: int, num_devices: int) -> Any:
    """Return the attributes of a `PipelineStage` of the first device that schedules read."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_devices,
        group_rank=0,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        submod=None,
    )


def as_text(action: _Action) -> list[str]:
    """Return texts such as `2F0`; simultaneous actions become consecutive ones."""
    return [str(part) for part in action.sub_actions or (action,)]


def planned(name: str, num_devices: int, micro_batches: int, chunks: int) -> _PipelineScheduleRuntime:
    """Return the engine's schedule, which is never run."""
    num_stages = num_devices * chunks
    mapping = generate_rank_to_stage_mapping(num_devices, num_stages, style=SCHEDULES[name].placement)
    stages = [stage_of(index, num_stages, num_devices) for index in mapping[0]]
    with mock.patch.object(_PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        return ENGINE[name](stages, micro_batches)


def announced(name: str, num_devices: int, micro_batches: int, chunks: int) -> list[list[str]]:
    """Return the engine's order per device without idle slots."""
    order = planned(name, num_devices, micro_batches, chunks).pipeline_order
    return [[text for action in order[rank] if action is not None for text in as_text(action)] for rank in order]


def ours(name: str, num_devices: int, micro_batches: int, chunks: int) -> list[list[str]]:
    """Return our action orders as text."""
    return [[str(action) for action in row] for row in SCHEDULES[name].actions(num_devices, micro_batches, chunks)]


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield K, M and V, including invalid ones."""
    yield from product(DEVICES, MICRO_BATCHES, range(1, 5) if name == "interleaved-zb" else (2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE)
def test_split_schedules_have_the_action_orders_of_torch(name: str) -> None:
    """Sizes that torch refuses are refused here too."""
    for num_devices, micro_batches, chunks in sizes(name):
        try:
            engine = announced(name, num_devices, micro_batches, chunks)
        except ValueError:
            with pytest.raises(UsageError):
                ours(name, num_devices, micro_batches, chunks)
            continue
        assert ours(name, num_devices, micro_batches, chunks) == engine, (num_devices, micro_batches, chunks)


def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_chunk() -> None:
    """ZB-H1 also runs with rounds of unequal length."""
    for num_devices, micro_batches in product(DEVICES, MICRO_BATCHES):
        if micro_batches % max(1, micro_batches // num_devices) == 0:
            engine = announced("interleaved-zb", num_devices, micro_batches, 1)
            assert ours("zb-h1", num_devices, micro_batches, 1) == engine


def test_torch_finds_split_schedules_by_name() -> None:
    named = {schedule.name: schedule.torch_name for schedule in SPLITTING if schedule.torch_name}
    assert {name: get_schedule_class(torch_name) for name, torch_name in named.items()} == ENGINE
