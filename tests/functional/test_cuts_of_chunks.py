"""Tests of difficult plans with several chunks: deterministic, near the best known, with a proven bound."""

from pathlib import Path

import pytest

from planner import files
from planner.core.values.plan import Plan
from tests.support.cli import call

CASES = Path(__file__).parents[1] / "support" / "several_chunks"

UNEVEN = ("q9_4.json", "--devices", "6", "--mem", "900TB", "--batch", "24", "--micro-batches", "24")
EVEN = ("zb_even_8.json", "--devices", "8", "--mem", "1297000001B", "--batch", "16", "--micro-batches", "16")
UNEVEN_TIGHT = ("uneven_39.json", "--devices", "4", "--mem", "4039688335B", "--batch", "16", "--micro-batches", "16")
TIGHT = ("q9_5.json", "--devices", "4", "--mem", "1935595966B", "--batch", "4", "--micro-batches", "4")
SMALL = ("tiny.json", "--devices", "2", "--mem", "900TB", "--batch", "6", "--chunks", "3", "--nodes", "2x1")

CUTS_OF_EVEN = "2,2,3,3,2,3,3,3,3,3,2,2,3,2,3,3,3,3,3,3,3,3,2,2"


def plan_of(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> Plan:
    """Return the plan that the command writes."""
    path = folder / "plan.yaml"
    ran = call(capsys, "solve", str(CASES / arguments[0]), *arguments[1:], "-o", str(path))
    assert ran.code == 0, ran.err
    return files.read_plan(str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "most_us"),
    [
        pytest.param((*EVEN, "--schedule", "auto"), 464_000, id="even"),
        pytest.param(
            (*EVEN, "--schedule", "interleaved", "--chunks", "3", "--balance", CUTS_OF_EVEN), 464_000, id="fixed cuts"
        ),
        pytest.param((*TIGHT, "--schedule", "interleaved", "--link", "2GB/s,20us"), 473_239, id="tight"),
        pytest.param(
            (*SMALL, "--schedule", "interleaved", "--link", "10GB/s,500us", "--inter-link", "1GB/s,500us"),
            228_353,
            id="small",
        ),
        pytest.param(
            (*UNEVEN_TIGHT, "--schedule", "search", "--link", "25GB/s,10us", "--headroom", "0%"),
            1_582_943,
            id="most orders exceed the memory",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_hard_cases_are_planned_within_a_known_step(capsys, tmp_path, arguments, most_us):
    plan = plan_of(capsys, tmp_path, *arguments)
    assert plan.predicted.step_us <= most_us
    assert call(capsys, "check", str(tmp_path / "plan.yaml")).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "row"),
    [("1f1b", "1F1B takes {:.0f} ms"), ("zbv", None), pytest.param("v-half", None, marks=pytest.mark.nightly)],
)
def test_the_example_of_schedules_in_little_memory_is_current(capsys, tmp_path, schedule, row):
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    devices = ("--devices", "8", "--mem", "1GB", "--batch", "16", "--micro-batches", "16", "--headroom", "0%")
    predicted = plan_of(capsys, tmp_path, "zb_even_8.json", *devices, "--schedule", schedule).predicted
    again = f"{100 * predicted.recompute_share:.0f} % of the time" if predicted.recompute_share else "none"
    row = row or f"| `{schedule}` | {100 * predicted.bubble:.0f} % | {again} | {{:.0f}} ms |"
    assert row.format(predicted.step_us / 1e3) in page


@pytest.mark.slow
def test_repeated_solves_give_the_same_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = plan_of(capsys, tmp_path, *TIGHT, "--schedule", "interleaved", "--chunks", "3")
    assert plan_of(capsys, tmp_path, *TIGHT, "--schedule", "interleaved", "--chunks", "3") == first


@pytest.mark.slow
def test_the_linear_program_closes_over_half_of_the_gap(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a gap of 13.5 %, less than 6 % must remain."""
    plan = plan_of(capsys, tmp_path, *UNEVEN, "--schedule", "interleaved")
    assert plan.predicted.step_us <= 1_348_500
    assert call(capsys, "check", str(tmp_path / "plan.yaml")).code == 0
    solver = plan.solver
    assert solver.status == "feasible"
    assert solver.gap is not None
    assert solver.gap < 0.06
    small = plan_of(capsys, tmp_path, *SMALL, "--schedule", "interleaved")
    assert small.solver.status == "optimal"
