"""Figures of a training run in words: ranges and units."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.judge.certainty import Certainty, certainty_of
from planner.core.values.plan import Plan, TrainingRunEstimate
from planner.core.values.profile import Profile
from planner.show.html.page import plan_html
from planner.show.terminal.plan import plan_text
from planner.show.terminal.plans import sweep_text
from planner.show.views.cluster import run_words, throughput_words, training_words
from planner.show.views.numbers import rate_text
from tests.support.profiles import inputs_of
from tests.unit.show.samples import style

SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return planner.profile(
        from_formula="transformer", **SHAPE, device="estimate:h100", dtype="bf16", rate="400TFLOP/s", batch_sizes="1,2"
    )


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return planner.solve(profile, devices=2, batch=8, schedule="gpipe", tokens="1T", price="2.50")


def test_duration_and_cost_have_the_range_of_the_step(plan: Plan) -> None:
    step_us = plan.predicted.step_us
    known = Certainty(source="", step_us=(step_us, 2 * step_us))
    run = TrainingRunEstimate(gpus=64, steps=10**6, days=25.3, gpu_hours=38_861.0, cost=97_152.0)
    words = training_words(replace(plan, training=run), known)
    assert words == [
        "1T tokens in 25 days (25 to 51)",
        "39,000 GPU-hours (38,000 to 78,000) on 64 GPUs",
        "cost 100,000 (90,000 to 200,000) at 2.5 per GPU-hour",
    ]
    assert run_words(run, plan.inputs)[0] == "1T tokens in 25.3 days"


def test_throughput_has_the_inverse_range_of_the_step(plan: Plan) -> None:
    step_us = plan.predicted.step_us
    fast = replace(plan, predicted=replace(plan.predicted, tokens_per_s=1_234_567.0, flops_utilization=0.4567))
    known = Certainty(source="", step_us=(step_us, 1.1 * step_us))
    assert throughput_words(fast, known) == [
        "1,230,000 (1,120,000 to 1,240,000) tokens/s",
        "model FLOPs utilization 45.7 %",
    ]
    unknown = replace(plan, predicted=replace(plan.predicted, tokens_per_s=0.0, flops_utilization=0.0))
    assert throughput_words(unknown, known) == []


@pytest.mark.parametrize(("days", "words"), [(2.0, "2.00 days"), (1.9, "45.6 hours"), (0.01, "864 s")])
def test_durations_are_in_the_largest_unit_with_at_least_two(days: float, words: str) -> None:
    run = TrainingRunEstimate(gpus=1, steps=1, days=days, gpu_hours=24 * days)
    length, hours = run_words(run, replace(inputs_of(1, 1), samples=1500))
    assert length == f"1500 samples in {words}"
    assert hours.endswith(" on 1 GPU")
    assert run_words(run, inputs_of(1, 1))[0] == f"1 step in {words}"


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0.0, "0.0"), (0.0503, "0.050"), (0.00123, "0.0012"), (0.1, "0.1"), (3.16, "3.2"), (1e4, "10,000")],
)
def test_small_rates_keep_two_digits(per_s: float, text: str) -> None:
    assert rate_text(per_s) == text


def test_terminal_report_and_json_show_the_same_figures(profile: Profile, plan: Plan) -> None:
    assert plan.training is not None
    certainty = certainty_of(plan, profile)
    text = plan_text(plan, (), style(100), certainty=certainty)
    page = plan_html(plan, profile, None, None, digest="")
    duration = training_words(plan, certainty)[0].removeprefix("1T tokens in ")
    assert f"1T tokens in {duration}" in text
    assert "model FLOPs utilization" in text
    assert duration.partition(" (")[0] in page
    assert "tokens/s" in page
    written = json.loads(files.json_text(plan))
    assert written["training"]["gpus"] == 2
    assert written["predicted"]["tokens_per_s"] > 0


def test_plans_without_a_requested_run_show_a_run_of_one_trillion_tokens(profile: Profile, plan: Plan) -> None:
    """The peak rate of a CPU is not known, and such a run would take years on one."""
    plain = planner.solve(profile, devices=2, batch=8, schedule="gpipe")
    assert plain.training is None
    certainty = certainty_of(plain, profile)
    words = training_words(plan, certainty)
    assert training_words(plain, certainty) == words[:2]
    assert " · ".join(words[:2]) in plan_text(plain, (), style(140), certainty=certainty)
    assert "<dt>1T tokens</dt>" in plan_html(plain, profile, None, None, digest="")
    on_cpu = replace(plain, predicted=replace(plain.predicted, flops_utilization=0.0))
    assert training_words(on_cpu, certainty) == []


def test_training_run_survives_a_round_trip(plan: Plan, tmp_path: Path) -> None:
    files.write(str(tmp_path / "plan.yaml"), plan)
    read = files.read_plan(str(tmp_path / "plan.yaml"))
    assert read.inputs == plan.inputs
    assert read.training.steps == plan.training.steps


def test_sweep_counts_gpus_if_several_share_each_layer(profile: Profile) -> None:
    wide = replace(profile, tensor_parallel=2)
    text = sweep_text(planner.sweep(wide, devices="2,4", batch=8, schedule="gpipe"), style(160))
    assert "smallest that trains: 2 GPUs with" in text
    assert text.splitlines()[1].startswith("GPUs  memory")


@pytest.mark.slow
def test_sweep_lists_the_smallest_and_the_cheapest_cluster(profile: Profile) -> None:
    """Costs include unused devices."""
    sweep = planner.sweep(
        profile, devices="1,2,3,16", batch=8, schedule="gpipe", replicas="auto", samples="1M", price=2
    )
    costs = [cell.training.cost for cell in sweep.cells if cell.training is not None]
    assert len(costs) == len(sweep.cells)
    assert sweep.cheapest is not None
    cheapest = sweep.cells[sweep.cheapest]
    assert cheapest.training.cost == min(cost for cost in costs if cost is not None)
    assert [cell.training.gpus for cell in sweep.cells if cell.training] == [1, 2, 3, 16]
    lines = sweep_text(sweep, style(160)).splitlines()
    (line,) = (line for line in lines if line.startswith("cheapest: "))
    assert "1M samples in " in line
    assert "at 2 per GPU-hour" in line
    assert sum(line.startswith("smallest that trains: ") for line in lines) == 1
