"""Schedule files: content, accompanying files, and execution by torch's runtime."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import files
from planner.core.errors import FileError, UsageError
from planner.core.schedule import SCHEDULES, format_orders, orders_from_csv, schedule_of
from planner.core.values.plan import Plan
from planner.emit.engines import engine_file
from planner.emit.layout import EngineFile
from tests.support.chains import chain, layer
from tests.support.ranks import ROOT, run_ranks

DEVICES, MICRO_BATCHES = 2, 4
BALANCES = {1: (4, 4), 2: (1, 3, 2, 2)}
PROFILE = chain(*(layer(f"block_{n}") for n in range(8)))


def plan_of(schedule: str, chunks: int = 0, **asked: Any) -> Plan:
    """Return a plan of eight layers on two devices."""
    rule = SCHEDULES[schedule]
    balance = BALANCES[chunks or rule.exact_chunks or (2 if rule.is_chunked else 1)]
    asked = {"recompute": "never", "balance": balance, "chunks": len(balance) // DEVICES, **asked}
    return planner.solve(
        PROFILE,
        devices=DEVICES,
        mem="8GB",
        batch=MICRO_BATCHES,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        **asked,
    )


def searched(plan: Plan) -> Plan:
    """Return the plan as if its action orders had been searched."""
    rows = schedule_of(plan.schedule).actions(plan.num_devices, plan.micro_batches, plan.chunks)
    return replace(plan, schedule="search", order=format_orders(rows))


def emitted(engine: str, plan: Plan) -> EngineFile:
    """Return the plan in a format."""
    return engine_file(engine, plan, PROFILE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_csv_has_the_action_orders(name: str) -> None:
    plan = plan_of(name)
    file = emitted("csv", plan)
    assert file.name == "schedule.csv"
    assert orders_from_csv(file.text) == SCHEDULES[name].actions(DEVICES, MICRO_BATCHES, plan.chunks)
    assert emitted("csv", searched(plan)).text == file.text


def test_schedule_csv_of_zbv_by_hand() -> None:
    first, second = emitted("csv", plan_of("zbv")).text.splitlines()
    assert first.startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    assert second.startswith("1F0,2F0,1F1,2F1,2I0,2W0,")


def test_schedule_csv_notes_list_missing_parts() -> None:
    cuts, placing, split, recompute = emitted("csv", plan_of("v-min", recompute="always")).notes
    assert "`--format torch`" in cuts
    assert "`ZBVZeroBubble`" in placing
    assert "torch splits backwards" in split
    assert "planned: always on stages 0 to 3" in recompute


@pytest.mark.parametrize(
    ("name", "placing"),
    [("zb-h1", "GPipe"), ("zb-h2", "GPipe"), ("v-half", "ZBVZeroBubble"), ("v-min", "ZBVZeroBubble")],
)
def test_schedules_unknown_to_torch_get_a_schedule_file(name: str, placing: str) -> None:
    """In torchtitan, the named schedule only places the stages."""
    plan = plan_of(name)
    table = emitted("csv", plan).text
    cuts = emitted("torch", plan)
    assert cuts.extra_files == {"schedule.csv": table}
    assert "SCHEDULE = " not in cuts.text
    assert '_load_csv("schedule.csv", format="compute_only")' in cuts.text
    titan = emitted("torchtitan", plan)
    assert titan.extra_files == {"schedule.csv": table}
    assert "# `pipeline_parallel_schedule` only decides which device has which stage." in titan.text
    assert f'"pipeline_parallel_schedule": "{placing}",' in titan.text
    assert '"pipeline_parallel_schedule_csv": "schedule.csv",' in titan.text


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_schedules_known_to_torch_get_no_schedule_file(name: str) -> None:
    for engine in ("torch", "torchtitan"):
        file = emitted(engine, plan_of(name))
        assert not file.extra_files
        assert SCHEDULES[name].torch_name in file.text
    assert ("STAGES = [[0, 3], [1, 2]]\n" in emitted("torch", plan_of(name)).text) == (name in ("zbv", "dualpipev"))


def test_searched_orders_get_a_schedule_file() -> None:
    for plan in map(searched, (plan_of("1f1b"), plan_of("interleaved"), plan_of("zbv"))):
        for engine in ("torch", "torchtitan"):
            assert emitted(engine, plan).extra_files == {"schedule.csv": emitted("csv", plan).text}


@pytest.mark.parametrize("engine", ["deepspeed", "torchgpipe"])
def test_engines_with_one_stage_per_device_refuse_chunks(engine: str) -> None:
    with pytest.raises(UsageError, match=r"the plan's schedule has 2 \(V-Half\)") as refused:
        emitted(engine, plan_of("v-half"))
    assert "`--format torch` or `torchtitan`" in refused.value.hint
    assert any("the plan uses ZB-H1, " in note for note in emitted(engine, plan_of("zb-h1")).notes)


def test_different_schedule_file_is_not_overwritten(tmp_path: Path) -> None:
    """It has no signature. If it differs, no other file is written either."""
    table = tmp_path / "schedule.csv"
    for _ in range(2):
        assert planner.emit(plan_of("zb-h1"), profile=PROFILE, output=tmp_path, engine="csv") == (table,)
    before = table.read_text()
    for engine in ("csv", "torch"):
        with pytest.raises(FileError, match="exists with other content") as refused:
            planner.emit(plan_of("zb-h2"), profile=PROFILE, output=tmp_path, engine=engine)
        assert "`--force`" in refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.csv"]
    assert table.read_text() == before
    written = planner.emit(plan_of("zb-h2"), profile=PROFILE, output=tmp_path, engine="torch", force=True)
    assert [path.name for path in written] == ["schedule.csv", "plan_torch.py"]
    assert table.read_text() != before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zbv", "v-half", "zb-h1"])
def test_torch_runtime_runs_the_schedule_file(tmp_path: Path, name: str) -> None:
    """Gradients of two processes equal those of the unpartitioned model, bit for bit."""
    plan = plan_of(name)
    files.write(str(tmp_path / "plan.yaml"), plan)
    planner.emit(tmp_path / "plan.yaml", profile=PROFILE, output=tmp_path, engine="csv")
    assert re.search(r"\dI0,", (tmp_path / "schedule.csv").read_text())
    worker = str(ROOT / "tests" / "support" / "schedule_csv_worker.py")
    run_ranks(DEVICES, [worker, "schedule.csv", json.dumps(plan.balance), str(MICRO_BATCHES)], tmp_path)
    count = 0
    for rank in range(DEVICES):
        apart, found, scale = json.loads((tmp_path / f"gradients{rank}.json").read_text())
        assert apart == 0 < scale
        count += found
    assert count == 2 * len(PROFILE.layers)
