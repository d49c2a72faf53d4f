"""Schedule files in torch's compute-only format: writing, reading, and errors with row and column."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Action, Schedule, orders_as_csv, orders_from_csv
from tests.unit.core.test_split_backward_matches_torch import planned, stage_of

actions = st.builds(Action, st.integers(0, 10**9 - 1), st.sampled_from("FBIW"), st.integers(0, 10**9 - 1))
"""Arbitrary actions, which need not be able to run."""


def test_schedule_csv_by_hand() -> None:
    assert orders_as_csv(SCHEDULES["1f1b"].actions(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert orders_as_csv(SCHEDULES["zb-h1"].actions(2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@settings(deadline=None)
@given(st.lists(st.lists(actions, min_size=1).map(tuple), min_size=1).map(tuple))
def test_action_orders_survive_a_round_trip(rows: tuple[tuple[Action, ...], ...]) -> None:
    assert orders_from_csv(orders_as_csv(rows)) == rows


def test_idle_slots_spaces_and_quotes_are_ignored() -> None:
    """Spreadsheets and torch also write carriage returns, a byte order mark and blank lines."""
    text = '\ufeff,0F0, ,0F1,,"0B0",0B1\r\n,,1F0,1B0,1F1,1B1,\r\n\r\n'
    assert orders_from_csv(text) == SCHEDULES["1f1b"].actions(2, 2)


def test_overlapped_actions_are_read_as_consecutive() -> None:
    (row,) = orders_from_csv("0F0,(0F1;1B0)OVERLAP_F_B, ( 1F1 ; 0B0 )OVERLAP_F_B")
    assert " ".join(map(str, row)) == "0F0 0F1 1B0 1F1 0B0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule file is empty"),
        ("\n \n", "the schedule file is empty"),
        ("0F0,0B0\n\n1F0,1B0", "row 2: the device has no action"),
        ("0F0\n,,\n1F0", "row 2: the device has no action"),
        ("0F0,0B0\n1F0,,1X0", "row 2, column 3: `1X0` is not an action"),
        ("0F0,F0", "row 1, column 2: `F0` is not an action"),
        ("0F0,0F", "row 1, column 2: `0F` is not an action"),
        ("0F0,0F0F0", "row 1, column 2: `0F0F0` is not an action"),
        ("0F0,-1F0", "row 1, column 2: `-1F0` is not an action"),
        ("0F0,0F٣", "row 1, column 2: `0F٣` is not an action"),
        ("0F0,0F1000000000", "row 1, column 2: `0F1000000000` is not an action"),
        ("0f0", "row 1, column 1: `0f0` must be in upper case"),
        ("0F0,0SEND_F0", "row 1, column 2: `0SEND_F0` is a transfer: only compute-only tables can be read"),
        ("0F0,0UNSHARD", "row 1, column 2: `0UNSHARD` is a transfer: only compute-only tables can be read"),
        ("0F0,(0F1;1B)OVERLAP_F_B", "row 1, column 2: `1B` is not an action"),
        ("0F0,()OVERLAP_F_B", "row 1, column 2: `` is not an action"),
        ("0F0,(0F1;1B0)", "row 1, column 2: `(0F1;1B0)` is not an action"),
        ("0F0;0B0", "row 1, column 1: `0F0;0B0` is not an action"),
        ("x" * 100, f"row 1, column 1: `{'x' * 37}...` is not an action"),
        ("x" * 200_000, "row 1: field larger than field limit (131072)"),
    ],
)
def test_errors_name_row_and_column(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        orders_from_csv(text)
    assert refused.value.message == message
    assert refused.value.hint.startswith("write a row for each device")


def runtime(num_devices: int, chunks: int, micro_batches: int) -> Any:
    """Return torch's runtime on the first device, without processes."""
    stages = [stage_of(index, num_devices * chunks, num_devices) for index in range(chunks)]
    for stage in stages:
        stage.has_backward, stage.stage_index_to_group_rank = True, {}
    with mock.patch("torch.distributed.pipelining.schedules.logger"):
        return _PipelineScheduleRuntime(stages, micro_batches, loss_fn=mock.Mock())


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.name)
def test_torch_loads_written_schedule_files(schedule: Schedule, tmp_path: Path) -> None:
    chunks = schedule.exact_chunks or (2 if schedule.is_chunked else 1)
    rows = schedule.actions(4, 8, chunks)
    path = tmp_path / "schedule.csv"
    path.write_text(orders_as_csv(rows), encoding="utf-8")
    engine = runtime(4, chunks, 8)
    engine._load_csv(str(path), format="compute_only")
    assert [[str(action) for action in engine.pipeline_order[rank]] for rank in range(4)] == [
        [str(action) for action in row] for row in rows
    ]
    devices = {stage: device for device in range(4) for stage in schedule.stages_on(device, 4, chunks)}
    assert engine.stage_index_to_group_rank == devices
    computes = [
        [str(action) for action in engine.pipeline_order_with_comms[rank] if action.is_compute_op] for rank in range(4)
    ]
    assert computes == [[str(action) for action in row] for row in rows]


@pytest.mark.parametrize(("name", "holds"), [("zbv", ",,"), ("dualpipev", ")OVERLAP_F_B")])
def test_schedule_files_of_torch_are_read(name: str, holds: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    planned(name, 4, 8, 2)._dump_csv(str(path), format="compute_only")
    text = path.read_text(encoding="utf-8")
    assert holds in text
    assert orders_from_csv(text) == SCHEDULES[name].actions(4, 8, 2)
