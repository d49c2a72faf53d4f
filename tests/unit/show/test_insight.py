"""Explanation of a plan."""

from dataclasses import replace

from planner.core.values.plan import Insight, WhatIf
from planner.core.values.units import format_us
from planner.show.terminal.plan import plan_text
from tests.unit.show.samples import MIB, explained, interleaved, plan, style

WIDE = style(120, wrap=False)


def section(planned, how=WIDE):
    text = plan_text(planned, (), how)
    return text[text.index("why this plan") :]


def test_explanation_has_bottleneck_limit_what_if_and_noise():
    step_us = explained().predicted.step_us
    assert section(explained(), style(100, wrap=False)).splitlines() == [
        "why this plan",
        "bottleneck  stage 1: forward 2.00 ms, backward 4.00 ms per micro-batch",
        "tightest    stage 1, 7.00 MiB free of 120 MiB",
        "what if     1 GB more on every device: no faster",
        f"            one more device: {format_us(step_us * 0.902)}, 9.8 % faster",
        f"            links [twice] as fast: {format_us(step_us * 1.01)}, 1.0 % slower",
        "noise       with measurement noise of ±2.1 %: in 20 random profiles this plan was at most 0.4 %",
        "            slower than the best one (mean 0.1 %); it was the best in 65 %",
    ]


def test_explanation_follows_the_trade_off():
    text = plan_text(explained(), (), WIDE)
    assert text.index("memory per stage") < text.index("the best plan for each") < text.index("why this plan")


def test_long_sentences_of_the_explanation_are_indented():
    lines = section(explained(), style(60)).splitlines()
    assert all(
        line[:12].strip() in ("why this pla", "why this plan", "bottleneck", "tightest", "what if", "noise", "")
        for line in lines
    )
    assert lines[-4].startswith("noise       with measurement noise of ±2.1 %: in 20 random")


def test_unknown_parts_of_the_explanation_are_omitted():
    insight = Insight(pace="the link after stage 0", tightest_device=0, free_bytes=0)
    assert section(replace(plan(), insight=insight)).splitlines() == [
        "why this plan",
        "bottleneck  the link after stage 0",
        "tightest    stage 0, 0 B free of 120 MiB",
    ]
    assert "why this plan" not in plan_text(plan(), (), WIDE)


def test_explanation_of_chunks_is_about_devices():
    """A device that does not exist causes no error."""
    insight = Insight(pace="stage 4", tightest_device=2, free_bytes=3 * MIB)
    assert "tightest    device 2, 3.00 MiB free of 120 MiB" in section(replace(interleaved(), insight=insight))
    odd = replace(insight, tightest_device=17)
    assert "tightest    device 17, 3.00 MiB free" in section(replace(plan(), insight=odd))


def test_explanation_of_a_step_without_time():
    still = replace(plan(), predicted=replace(plan().predicted, step_us=0.0))
    insight = Insight(pace="x", tightest_device=0, free_bytes=0, what_if=(WhatIf(change="y", step_us=0.0),))
    assert "y: no faster" in section(replace(still, insight=insight))
