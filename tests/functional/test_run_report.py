"""Tests of recorded runs: consistent sums in the report, and complete traces."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from planner.files import read_run
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, Case, write_balance

pytestmark = pytest.mark.slow

SMALL = (("layers", 2), ("width", 32), ("feed_forward", 64), ("heads", 2), ("vocabulary", 64), ("tokens", 16))
STAGES, MICRO_BATCHES, STEPS = 3, 4, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train five steps on three ranks under 1F1B with recomputation."""
    folder = tmp_path_factory.mktemp("run")
    case = Case(
        model=ROOT / "sample_models/transformer_lm.py",
        balance=(1, 2, 1),
        settings=SMALL,
        recompute="except-last",
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
    )
    write_balance(case, folder / "balance.yaml")
    said = run_ranks(STAGES, [str(ROOT / "tests/support/timeline_worker.py"), "balance.yaml"], folder)
    assert " samples/s\n" in said
    return folder


def slices(folder: Path) -> list[dict[str, Any]]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_the_report_has_times_waits_speeds_and_transfers(folder: Path) -> None:
    report = read_run(str(folder / "run.json"))
    assert len(report.losses) == len(report.step_us) == len(report.samples_per_s) == STEPS
    assert report.samples_per_s[3] == pytest.approx(report.batch / report.step_us[3] * 1e6, rel=1e-3)
    assert report.bubble is not None
    assert 0 < report.bubble < 1
    assert report.overhead_us is not None
    assert report.overhead_us > 0
    for stage in report.stages:
        assert 0 < stage.recompute_us < stage.backward_us
        assert stage.transfer_us > 0
        assert stage.idle_us > 0
    assert [boundary.index for boundary in report.boundaries] == [0, 1]
    assert all(boundary.forward_us > 0 < boundary.backward_us for boundary in report.boundaries)


def test_only_the_first_rank_calls_step_callbacks(folder: Path) -> None:
    """The loss is that of the report, and samples are those of the whole mini-batch."""
    report = read_run(str(folder / "run.json"))
    (steps,) = folder.glob("steps_*.txt")
    assert steps.name == "steps_0.txt"
    assert steps.read_text().splitlines() == [f"{n} {loss} {report.batch}" for n, loss in enumerate(report.losses)]


def test_the_trace_has_every_forward_and_backward(folder: Path) -> None:
    """The last micro-batch is not recomputed."""
    found = defaultdict(list)
    for event in slices(folder):
        found[event["cat"], event["pid"], event["args"]["step"]].append(event["args"].get("micro_batch"))
    for rank in range(STAGES):
        for step in range(STEPS):
            assert sorted(found["forward", rank, step]) == list(range(MICRO_BATCHES))
            assert sorted(found["backward", rank, step]) == list(range(MICRO_BATCHES))
            assert sorted(found["recompute", rank, step]) == list(range(MICRO_BATCHES - 1))
            assert len(found["optimizer", rank, step]) == 1


def test_actions_begin_after_their_inputs_on_one_clock(folder: Path) -> None:
    ends = {}
    begins = {}
    for event in slices(folder):
        if event["cat"] in ("forward", "backward"):
            key = event["cat"], event["args"]["stage"], event["args"]["step"], event["args"]["micro_batch"]
            begins[key], ends[key] = event["ts"], event["ts"] + event["dur"]
    for (kind, stage, *rest), begin in begins.items():
        before = ends.get((kind, stage + (-1 if kind == "forward" else 1), *rest))
        assert before is None or before <= begin + 1


def test_slices_of_a_row_are_disjoint_or_nested(folder: Path) -> None:
    """A recomputation is nested in its backward."""
    rows = defaultdict(list)
    for event in slices(folder):
        rows[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event))
    for found in rows.values():
        around: list[dict[str, Any]] = []
        for start, minus, event in sorted(found, key=lambda item: item[:2]):
            end = round(start - minus, 3)
            while around and around[-1]["ts"] + around[-1]["dur"] <= start + 1e-3:
                around.pop()
            assert not around or end <= around[-1]["ts"] + around[-1]["dur"] + 1e-3
            if event["cat"] == "recompute":
                assert around[-1]["cat"] == "backward"
                assert around[-1]["args"]["micro_batch"] == event["args"]["micro_batch"]
            around.append(event)


def test_every_receive_has_a_send_at_the_same_time(folder: Path) -> None:
    sends = {(e["ts"], e["dur"]) for e in slices(folder) if e["cat"].startswith("send")}
    receives = {(e["ts"], e["dur"]) for e in slices(folder) if e["cat"] == "receive"}
    assert sends == receives
    assert receives


def test_clock_offsets_are_found_within_20_ms(folder: Path) -> None:
    for rank in range(1, STAGES):
        found = int((folder / f"offset_{rank}.txt").read_text())
        assert found == pytest.approx(-rank * 1e9, abs=2e7)
