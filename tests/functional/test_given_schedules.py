"""Tests of `solve --schedule FILE.csv`, and of `check` with edited action orders."""

from pathlib import Path
from typing import Any

import pytest

import planner
from planner import files
from planner.core.errors import FileError, PlannerError, UsageError
from planner.core.schedule import SCHEDULES, orders_as_csv
from planner.core.values.plan import Plan
from tests.support.chains import chain, layer
from tests.support.cli import call

PROFILE = chain(*(layer(f"block_{n}", forward_us=10.0 + n, saved_bytes=10**6, output_bytes=100) for n in range(8)))
DEVICES, MICRO_BATCHES = 2, 4
CHUNKS = {name: rule.exact_chunks or (2 if rule.is_chunked else 1) for name, rule in SCHEDULES.items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the profile."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", PROFILE)
    return tmp_path


def table(name: str, **changes: str) -> str:
    """Write a named schedule to a file, with `changes` of its text."""
    text = orders_as_csv(SCHEDULES[name].actions(DEVICES, MICRO_BATCHES, CHUNKS[name]))
    for old, new in changes.items():
        text = text.replace(old.lstrip("_"), new)
    Path("mine.csv").write_text(text)
    return "mine.csv"


def solved(schedule: Any, **asked: Any) -> Plan:
    """Return a plan for the profile in this folder."""
    return planner.solve("profile.yaml", **{"mem": "8GB", "batch": MICRO_BATCHES, "schedule": schedule, **asked})


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_named_schedule_from_a_file_gives_the_same_plan(here: Path, name: str) -> None:
    """Devices, micro-batches, chunks and placement follow from the file."""
    named = solved(name, devices=DEVICES, micro_batches=MICRO_BATCHES, chunks=CHUNKS[name])
    given = solved(table(name), balance=named.balance, output="plan.yaml")
    assert given.schedule == "search"
    assert given.inputs.schedule == "given"
    assert (given.num_devices, given.micro_batches, given.chunks) == (DEVICES, MICRO_BATCHES, CHUNKS[name])
    assert given.placement == named.placement
    assert given.predicted.step_us == pytest.approx(named.predicted.step_us, rel=1e-12)
    assert given.peak_bytes_by_device() == pytest.approx(named.peak_bytes_by_device(), rel=1e-6)
    assert solved(Path("mine.csv")).predicted.step_us <= given.predicted.step_us * (1 + 1e-12)
    assert planner.check("plan.yaml").fits
    assert planner.emit("plan.yaml", engine="csv", output="out")[0].read_text() == Path("mine.csv").read_text()


def test_solve_prints_the_cost_and_check_accepts_the_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "solve", "--schedule", table("zbv"), "--mem", "8GB", "--batch", "4")
    assert done.code == 0, done.err
    assert "2 devices × 2 chunks × 4 micro-batches of 1 sample" in done.out  # noqa: RUF001 - as shown
    assert "plan with this schedule" in done.out
    done = call(capsys, "check")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"devices": 1}, "`mine.csv` is for 2 devices, but there are 1"),
        ({"devices": 3, "replicas": 2, "batch": 8}, "`mine.csv` is for 2 devices, in 2 replicas 4, but there are 3"),
        ({"nodes": "1x1"}, "`mine.csv` is for 2 devices, but there are 1"),
        ({"batch": 6}, "`mine.csv` is for 4 micro-batches, into which a batch of 6 cannot be split"),
        ({"micro_batches": 2}, "`--micro-batches 2`: `mine.csv` has 4"),
        ({"chunks": 1}, "`--chunks 1`: each device of `mine.csv` has 2"),
        ({"solver": "milp"}, "for the GPipe schedule only"),
        ({"balance": (4, 4)}, "`--balance` has 2 stages, but `mine.csv` has 4"),
    ],
)
def test_options_that_contradict_the_file_are_refused(here: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        solved(table("zbv"), **asked)
    assert said in refused.value.message


def test_files_with_more_stages_than_layers_are_refused(here: Path) -> None:
    rows = SCHEDULES["interleaved"].actions(2, 4, 5)
    Path("mine.csv").write_text(orders_as_csv(rows))
    with pytest.raises(UsageError, match=r"`mine\.csv` is for 10 stages, the profile has 8 layers"):
        solved("mine.csv")


def test_replicas_share_a_schedule_file(here: Path) -> None:
    plan = solved(table("zb-h1"), replicas=2, batch=8)
    assert (plan.inputs.devices, plan.replicas, plan.micro_batches) == (4, 2, 4)
    assert solved("mine.csv", replicas="auto", devices=4, batch=8).replicas == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the schedule file is empty"),
        ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: `1X0` is not an action"),
        ("0F0,0f1,0B0\n", "row 1, column 2: `0f1` must be in upper case"),
        ("0F0,0SEND_F0\n", "row 1, column 2: `0SEND_F0` is a transfer"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "row 2: the device has no action"),
        ("0F0,0I0\n1F0,1B0\n", "device 0: micro-batch 0 passes stage 0 by 0F0, 0I0"),
        ("0B0,0F0\n1F0,1B0\n", "deadlock: device 0 cannot start 0B0 before 1B0"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "deadlock: device 0 cannot start"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", "device 1 has 1 stages, device 0 has 2"),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", "which is neither a loop nor a V"),
        ("0F999999999,0B999999999\n", "device 0: micro-batch 0 passes stage 0 by no action"),
        ("\x00\n", "row 1"),
    ],
)  # fmt: skip
def test_bad_schedule_files_name_row_and_column(here, capsys, text, said):
    Path("mine.csv").write_text(text)
    done = call(capsys, "solve", "--schedule", "mine.csv", "--mem", "8GB", "--batch", "4")
    assert done.code == 2
    assert done.err.startswith("mine.csv: error: ")
    assert said in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


def test_unreadable_schedule_files_are_refused(here: Path) -> None:
    with pytest.raises(FileError, match="no such file") as refused:
        solved("nowhere.csv")
    assert "emit --format csv" in refused.value.hint
    Path("folder.csv").mkdir()
    with pytest.raises(FileError, match="is a directory"):
        solved("folder.csv")
    Path("mine.csv").write_bytes(b"\xff0F0")
    with pytest.raises(FileError, match="is not UTF-8 text"):
        solved("mine.csv")


def test_the_schedule_file_is_not_overwritten(here: Path) -> None:
    with pytest.raises(PlannerError, match=r"mine\.csv"):
        solved(table("zbv"), output="mine.csv")


def test_sweep_refuses_a_schedule_file(here: Path) -> None:
    with pytest.raises(UsageError, match="tries several numbers of devices") as refused:
        planner.sweep("profile.yaml", schedule=table("zbv"), mem="8GB")
    assert "solve --schedule mine.csv" in refused.value.hint


def test_infeasible_schedule_files_name_a_limit_that_fits(here: Path) -> None:
    with pytest.raises(PlannerError, match=r"a device needs .* over") as refused:
        solved(table("zbv"), mem="3MB")
    enough = refused.value.hint.split("`--mem` ")[1].split()[0]
    plan = solved("mine.csv", mem=enough)
    assert plan.predicted.step_us > 0
    with pytest.raises(PlannerError):
        solved("mine.csv", mem="3MB", balance=(2, 2, 2, 2))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0F0 0F1", "0F0 0F0", "device 0: 0F0 occurs twice"),
        ("0I0 0W0", "0W0 0I0", "device 0 cannot start 0W0 before 0I0 (device 0)"),
        ("2F0", "0F9", "device 1: stage 0 of 0F9 is on device 0"),
        ("1F0 2F0 1F1 2F1 2I0", "1F1 2F1 1F0 2F0 2I0", ""),
        ("3W0", "", "device 0: micro-batch 0 passes stage 3 by 3F0, 3I0"),
    ],
)
def test_check_judges_an_edited_action_order(here, capsys, old, new, said):
    solved(table("zbv"), output="plan.yaml")
    text = Path("plan.yaml").read_text()
    assert old in text
    Path("plan.yaml").write_text(text.replace(old, new, 1))
    done = call(capsys, "check")
    assert done.code == (2 if said else 0), done.err
    assert said in done.err.replace("\n", " ")
    assert not said or "plan.yaml:" in done.err


def test_check_counts_memory_of_the_edited_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = solved(table("zb-h1"), output="plan.yaml", balance=(4, 4), recompute="never")
    cap = max(plan.peak_bytes_by_device())
    text = Path("plan.yaml").read_text()
    first = "0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3"
    assert plan.order[0] in text
    Path("plan.yaml").write_text(text.replace(plan.order[0], first))
    done = call(capsys, "check", "--mem", f"{cap}B")
    assert done.code == 1
    assert "GP101" in done.out + done.err


def test_check_balance_keeps_the_action_order(here: Path) -> None:
    solved(table("zbv"), output="plan.yaml")
    verdict = planner.check("plan.yaml", balance=(1, 3, 1, 3))
    assert verdict.plan.balance == (1, 3, 1, 3)
    assert verdict.plan.order


def test_schedules_without_enough_micro_batches_are_skipped(here: Path) -> None:
    """DualPipeV needs as many micro-batches as there are stages."""
    with pytest.raises(PlannerError, match="needs at least as many micro-batches as stages"):
        solved("dualpipev", devices=DEVICES, batch=1)
    assert solved("auto", devices=DEVICES, batch=1).micro_batches == 1
