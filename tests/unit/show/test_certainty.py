"""Error ranges in words: significant digits, and their source in one line."""

import json
import random
import re
from dataclasses import replace

import pytest

from planner import files
from planner.core.judge.certainty import Certainty, certainty_of
from planner.core.judge.verdict import judge
from planner.show.html import plan_html
from planner.show.terminal.plan import plan_text
from planner.show.terminal.verdict import verdict_text
from planner.show.views.certainty import accuracy_words, peak_words, rate_words, step_words
from tests.unit.show.samples import MIB, plan, profile, step_of_sample, style

OPEN = Certainty(source="compiled for tpu:v2")


def taking(step_us, samples_per_s=18.64):
    planned = plan()
    return replace(planned, predicted=replace(planned.predicted, step_us=step_us, samples_per_s=samples_per_s))


@pytest.mark.parametrize(
    ("step_us", "range_us", "step", "rate"),
    [
        (532e3, (500e3, 590e3), "530 ms (500 to 590)", "18.6 (16.8 to 19.9)"),
        (430.4e3, (417e3, 524e3), "430 ms (410 to 530)", "18.6 (15.3 to 19.3)"),
        (5.54e6, (5.53e6, 5.56e6), "5.54 s (5.53 to 5.56)", "18.6 (18.5 to 18.7)"),
        (73.2e3, (73.2e3, 86.5e3), "73 ms (73 to 87)", "18.6 (15.7 to 18.7)"),
        (6.9e3, (6.2e3, 15.3e3), "7 ms (6 to 16)", "19 (8 to 21)"),
        (980e3, (930e3, 1.12e6), "980 ms (930 to 1,120)", "18.6 (16.3 to 19.7)"),
        (200.0, (180.0, 220.0), "200 us (180 to 220)", "18.6 (16.9 to 20.8)"),
        (390e3, (577e3, 716e3), "570 to 720 ms (390 predicted)", "10.1 to 12.6 (18.6 predicted)"),
        (400e3, None, "about 400 ms", "19"),
        (5.31e6, None, "about 5.3 s", "19"),
    ],
)
def test_figures_have_the_digits_that_their_range_allows(step_us, range_us, step, rate):
    """Ends are rounded outward; without a range there are two digits."""
    certainty = replace(OPEN, step_us=range_us)
    assert step_words(taking(step_us), certainty) == step
    assert rate_words(taking(step_us), certainty) == rate


@pytest.mark.slow
def test_headline_is_inside_its_range_or_marked_as_predicted():
    """Rounding moves no headline out of the range beside it."""
    rng = random.Random(0)
    for _ in range(500):
        step_us = 10 ** rng.uniform(0.5, 9)
        ends = sorted(step_us * rng.lognormvariate(0, 0.3) for _ in range(2))
        certainty = replace(OPEN, step_us=(ends[0], ends[1]))
        planned = taking(step_us, samples_per_s=16e6 / step_us)
        for words in (step_words(planned, certainty), rate_words(planned, certainty)):
            value, low, high = figures_of(words)
            assert (low <= value <= high) == ("predicted" not in words), (step_us, ends, words)
        # The word is used only if the prediction itself is outside of the range.
        assert ("predicted" in step_words(planned, certainty)) <= (not ends[0] <= step_us <= ends[1])


def figures_of(words: str) -> tuple[float, float, float]:
    """Return headline and range of `530 ms (500 to 590)` or `570 to 720 ms (390 predicted)`."""
    numbers = [float(text.replace(",", "")) for text in re.findall(r"[\d,]+(?:\.\d+)?(?:e[+-]\d+)?", words)]
    first, second, third = numbers
    return (third, first, second) if "predicted" in words else (first, second, third)


@pytest.mark.parametrize(("share", "word"), [(2.0, "fits"), (1.0, "tight"), (0.99, "does not fit")])
def test_terminal_report_and_json_use_the_same_three_words(share, word):
    planned = plan(of=profile())
    limits = tuple(int(share * need) for need in planned.peak_bytes_by_device())
    verdict = judge(planned, profile(), profile_digest="sha256:0", memory_bytes=limits)
    text = plan_text(verdict.plan, (), style(120, wrap=False), certainty=verdict.certainty)
    assert f" · {word}\n" in text
    assert f"{word}; " in plan_html(verdict.plan, profile(), step_of_sample(verdict.plan), None, digest="sha256:0")
    assert json.loads(files.json_text(verdict))["memory"] == word
    assert verdict_text(verdict, style(120, wrap=False)).splitlines()[-1].startswith(word)


def test_peak_is_shown_with_its_upper_end():
    """It is that of the device nearest to its limit, rounded up."""
    planned = plan((1, 3, 2))
    needs = [need / MIB for need in planned.peak_bytes_by_device()]
    most = tuple(round((need * 1.01) * MIB) + 7 for need in needs)
    words = peak_words(planned, replace(OPEN, device_bytes=most))
    fullest = needs.index(max(needs))
    size, _, bound = words.partition(" MiB (at most ")
    assert float(size) == pytest.approx(needs[fullest], rel=0.005)
    assert 0 <= float(bound.rstrip(")")) - most[fullest] / MIB <= 1
    assert "at most" not in peak_words(planned, OPEN)


def test_a_device_of_varying_speed_is_mentioned():
    varying = replace(OPEN, round_ratios=(0.95, 1.32))
    assert "; the device's speed varied: rounds over all layers took -5.0 % to +32.0 %; " in accuracy_words(varying)
    assert "speed" not in accuracy_words(replace(OPEN, round_ratios=(0.95, 1.08)))


def test_an_upper_end_below_the_limit_is_not_shown_above_it():
    limit = 104 * MIB + MIB // 2
    planned = plan((1, 3, 2))
    assert max(planned.peak_bytes_by_device()) < 91 * MIB
    limited = replace(planned, stages=tuple(replace(stage, memory_bytes=limit) for stage in planned.stages))
    certainty = replace(OPEN, device_bytes=(limit - MIB // 10,) * planned.num_devices)
    assert peak_words(limited, certainty).endswith("(at most 104.5)")
    assert peak_words(planned, certainty).endswith("(at most 105)")
    # The range may use the headroom, which the limit leaves free.
    inputs = replace(planned.inputs, headroom=0.1)
    stages = tuple(replace(stage, memory_bytes=round(0.9 * limit)) for stage in planned.stages)
    assert peak_words(replace(planned, inputs=inputs, stages=stages), certainty).endswith("(at most 104.5)")


def test_terminal_and_report_show_the_same_ranges():
    planned = plan(of=profile())
    certainty = certainty_of(planned, profile())
    text = plan_text(planned, (), style(120, wrap=False), certainty=certainty)
    page = plan_html(planned, profile(), step_of_sample(planned), None, digest="sha256:0")
    reason = accuracy_words(certainty)
    assert reason.startswith("accuracy: measured on GPUs; earlier step predictions were off by -14.6 % to +17.1 %")
    assert reason in " ".join(text.split())
    assert reason.removeprefix("accuracy: ") in page
    for words in (step_words(planned, certainty), peak_words(planned, certainty)):
        assert words in text
        assert words.replace(" (", '<small class="range">(') in page
    assert " to " not in plan_text(planned, (), style(120, wrap=False)).splitlines()[1]


def test_figures_without_measured_runs_are_marked():
    assert (
        accuracy_words(OPEN)
        == "accuracy: compiled for tpu:v2; no similar step was measured; no similar peak was measured"
    )
