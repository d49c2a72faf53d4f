"""Error ranges of predictions, compared with the committed rows of measurements."""

import re
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest

from benchmarks.published_runs import read
from planner.core.errors import UsageError
from planner.core.judge.certainty import (
    ALLOCATOR_RATIO,
    PEAK_RATIOS,
    SHORTEST_US,
    SLACK_BYTES,
    STEP_ERRORS,
    certainty_of,
    headroom_for,
)
from planner.core.values.devices import accelerator
from planner.core.values.profile import Device, Model, WidthCosts
from planner.solve import Request, solve
from tests.support.profiles import inputs_of, profile_of

PAGES = Path(__file__).parents[3] / "docs" / "measurements"


def rows(page, section=""):
    """Return the tables of a section of a page, or of the text before the first section, as lists of cells."""
    text = f"\n{(PAGES / page).read_text(encoding='utf-8')}".split(f"\n## {section}\n" if section else "\n# ")[1]
    lines = text.split("\n## ")[0].splitlines()
    # The line above a rule has the titles of columns.
    tables = [line for line, below in pairwise([*lines, ""]) if line.startswith("| ") and not below.startswith("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def shares(cells):
    """Return the signed percentages of cells as fractions."""
    return [float(share) / 100 for cell in cells for share in re.findall(r"([+-]\d+\.\d+|\b0\.0) ?%", cell)]


def ms(cell):
    number, unit, *_ = cell.split()  # then the range of several runs
    return float(number) * {"ms": 1, "s": 1000}[unit]


def of_two_machines(page):
    short = rows(page, "Short micro-batches") if page == "verify.md" else []
    return [*rows(page), *rows(page, "On another machine"), *short]


def on_the_cpu():
    """Yield the duration of a micro-batch in microseconds, and measured over predicted."""
    for cells in of_two_machines("verify.md"):
        slots = int(cells[2].split("; ")[1]) + 1
        yield 1000 * ms(cells[3]) / slots, 1 + shares([cells[5]])[0]
    for cells in of_two_machines("cpu.md"):
        yield 1000 * ms(cells[3]) / 5, 1 + shares([cells[5]])[0]


def published(*sections):
    """Return measured over predicted from pages that list predicted over measured."""
    tables = (rows("published.md", section) for section in sections)
    return [1 / (1 + shares(cells)[0]) for table in tables for cells in table if shares(cells)]


def rates_reached():
    return rows("published.md", "Rates that were reached")


SEEN = {
    "one device": lambda: [1 / (1 + shares(cells)[-1]) for cells in rows("time.md", TIME)],
    "cpu": lambda: [ratio for slot_us, ratio in on_the_cpu() if slot_us >= SHORTEST_US],
    # Between the two kinds of rows there is none: what is shorter than the one may be as the other.
    "short": lambda: [ratio for _, ratio in on_the_cpu()],
    "calibrated": lambda: [ms(cells[7]) / ms(cells[4]) for cells in of_two_machines("verify.md")],
    "cuda": lambda: [
        *published(
            "GPT on 8 A100: nothing fitted",
            "One plan from another plan's times",
            "OPT-350M on GH200: one number fitted",
            "Schedules with split backward, on A100",
        ),
        *(ms(cells[4]) / ms(cells[3]) for cells in rows("gpu.md", "Whole models")),
    ],
    "rate": lambda: published("A rate that is given", "Steps of another chip", "Time by formula"),
    "A100": lambda: [1 / (1 + shares(cells)[0]) for cells in rates_reached() if cells[0] == "A100"],
    "H100": lambda: [1 / (1 + shares(cells)[0]) for cells in rates_reached() if cells[0] == "H100"],
    "few runs": lambda: [1 / (1 + shares(cells)[0]) for cells in rates_reached()],
    "peak": lambda: [
        accelerator(DEVICES[cells[0].partition(",")[0]]).half_flops_per_s / 1e12 / float(cells[3])
        for cells in rates_reached()
    ],
}
DEVICES = {"A100": "a100-80gb", "H100": "h100", "GB200": "gb200"}
TIME = "Sum of the layers against the whole step"


@pytest.mark.parametrize("kind", STEP_ERRORS)
def test_step_ranges_equal_the_extremes_of_their_rows(kind):
    ratios = SEEN[kind]()
    assert (STEP_ERRORS[kind].least, STEP_ERRORS[kind].most) == pytest.approx((min(ratios), max(ratios)), abs=1e-3)
    page = (PAGES.parent / "cost-model.md").read_text(encoding="utf-8")
    assert f" {STEP_ERRORS[kind].least:.3f} to {STEP_ERRORS[kind].most:.3f}" in page


def test_peak_ranges_cover_their_rows_and_are_tight():
    page = (PAGES / "memory.md").read_text(encoding="utf-8")
    assert PEAK_RATIOS["measured"] == 1 / (1 - int(re.search(r"Errors of -(\d)%", page)[1]) / 100)
    measured = [*rows("memory.md"), *rows("memory.md", "Kinds of models whose memory is hard to predict")]
    assert len(measured) > 100
    for cells in measured:
        largest_bytes = float(cells[5].split()[-2]) * 2**20
        assert 1 / (1 + shares([cells[6]])[0]) * largest_bytes <= PEAK_RATIOS["measured"] * largest_bytes + SLACK_BYTES
    on_a_gpu = [*rows("gpu.md", "Peak memory of stages"), *rows("gpu.md", "Whole models")]
    assert PEAK_RATIOS["cuda"] == pytest.approx(max(1 + shares(cells)[-1] for cells in on_a_gpu), abs=1e-3)
    compiled = [1 / float(cells[-1]) for cells in rows("tpu-composition.md")]
    assert PEAK_RATIOS["compiled"] == pytest.approx(max(compiled), abs=1e-3)
    assert PEAK_RATIOS["estimated"] == pytest.approx(max(published("Memory by formula")), abs=1e-3)
    reserved = [float(line["reserved_mib"]) / float(line["allocated_mib"]) for line in read("gpt-8xa100")]
    assert pytest.approx(max(reserved), abs=1e-3) == ALLOCATOR_RATIO


def on(kind="cpu", *, how="measured", settings=None, name="", us=10_000.0):
    """Return a profile and a plan of two stages; repeats differ by 10 %, and the first two layers share a digest."""
    profile = profile_of([us] * 4, [us] * 4, parameter_bytes=10**6)
    layers = tuple(
        replace(layer, digest="twice" if n < 2 else "", spread=(0.1,)) for n, layer in enumerate(profile.layers)
    )
    device = Device(kind=kind, how=how, name=name)
    profile = replace(profile, layers=layers, device=device, model=Model(settings=settings or {}))
    return profile, solve(profile, Request(inputs=inputs_of(2, 4), balance=(2, 2)))


def test_step_range_combines_rows_and_repeats():
    """Errors of one measurement add up, errors of several partly cancel out."""
    profile, plan = on()
    certainty = certainty_of(plan, profile)
    assert certainty.sampling == pytest.approx(0.1)
    step_us, seen = plan.predicted.step_us, STEP_ERRORS["cpu"]
    assert certainty.step_us == pytest.approx((step_us * seen.least / 1.1, step_us * seen.most * 1.1), rel=1e-3)
    assert certainty.device_bytes == tuple(
        -int(-need / 0.99 // 1) + SLACK_BYTES for need in plan.peak_bytes_by_device()
    )
    apart = replace(profile, layers=tuple(replace(layer, digest="") for layer in profile.layers))
    assert certainty_of(plan, apart).sampling == pytest.approx(0.1 / sqrt(2))


def test_step_range_is_as_wide_as_the_devices_speed_varied():
    profile, plan = on()
    steady, varying = (
        certainty_of(plan, each) for each in (profile, replace(profile, fast_round_ratio=0.8, slow_round_ratio=1.5))
    )
    assert varying.step_us == pytest.approx((0.8 * steady.step_us[0], 1.5 * steady.step_us[1]))


def test_sampling_error_uses_the_layers_of_the_plans_width():
    profile, _ = on()
    calm = tuple(replace(layer, spread=(0.02,)) for layer in profile.layers)
    both = replace(profile, widths=(WidthCosts(tensor_parallel=2, layers=calm),))
    for width, spread in ((1, 0.1), (2, 0.02)):
        inputs = replace(inputs_of(2 * width, 4), tensor_parallel=width)
        plan = solve(both, Request(inputs=inputs, balance=(2, 2)))
        assert certainty_of(plan, both).sampling == pytest.approx(spread)


def test_calibrated_plan_has_the_error_range_of_repeated_runs():
    profile, plan = on()
    plan = replace(plan, inputs=replace(plan.inputs, step_ratio=1.5))
    again = STEP_ERRORS["calibrated"]
    assert certainty_of(plan, profile).step_ratio == pytest.approx((1.5 * again.least, 1.5 * again.most))


FORMULA = {"formula": "transformer", "rate": "190 TFLOP/s"}
KINDS = {
    "short": lambda: on(us=1000.0),
    "cuda": lambda: on("cuda"),
    "rate": lambda: on("cuda", how="estimated", settings=FORMULA),
    "peak": lambda: on(
        "cuda", how="estimated", settings=FORMULA | {"rate": "312 TFLOP/s"}, name="NVIDIA A100-SXM4-80GB"
    ),
}


def test_every_kind_of_profile_has_its_own_error_range():
    """Predictions without comparable runs have none."""
    for kind, make in KINDS.items():
        profile, plan = make()
        assert certainty_of(plan, profile).source == STEP_ERRORS[kind].source
    profile, plan = on()
    one = solve(profile, Request(inputs=inputs_of(1, 4), balance=(4,)))
    assert certainty_of(one, profile).source == STEP_ERRORS["one device"].source
    compiled = certainty_of(plan, on("tpu:v2", how="compiled")[0])
    assert (compiled.step_us, compiled.peak_ratio) == (None, PEAK_RATIOS["compiled"])
    assert certainty_of(plan, on("cuda", how="estimated")[0]).step_us is None
    assert certainty_of(plan, on("tpu:v2")[0]).device_bytes == ()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("cap", [10**6, 8 * 10**9])
def test_headroom_auto_covers_the_highest_peak(kind, cap):
    """The headroom is at most a tenth of a percent larger than needed."""
    profile, plan = on(kind)
    for share, fits in ((headroom_for(profile, [cap]), True), (headroom_for(profile, [cap]) - 0.0011, False)):
        need = replace(plan.stages[0].memory, total=int(cap * (1 - share)))
        full = replace(plan, stages=tuple(replace(stage, memory=need) for stage in plan.stages))
        assert (max(certainty_of(full, profile).device_bytes) <= cap + 1) == fits


def test_headroom_auto_needs_measured_peaks():
    with pytest.raises(UsageError, match="there is no measured peak"):
        headroom_for(on("tpu:v2")[0], [10**9])
