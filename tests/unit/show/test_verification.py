"""Text of a verification: figures with verdicts, calibration, and the answer."""

from dataclasses import replace

from planner.core.judge.verification import Tolerance, verification_of
from planner.show.terminal.run import verification_text
from tests.unit.show.samples import plan, profile, report, style, verification

WIDE = style(120, wrap=False)
TOLERANCE = Tolerance(step=0.1, memory_below=0.01, memory_above=0.05)


def row(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_only_judged_figures_are_marked():
    """Step and peaks have `ok` or `! OFF`, other figures nothing."""
    text = verification_text(verification_of(plan(), profile(), report(plan(), time_factor=1.2), TOLERANCE), WIDE)
    assert row(text, "step").split()[-4:] == ["+20.0", "%", "!", "OFF"]
    assert row(text, "peak memory, device 0").endswith("-1.0 %     ok")
    assert row(text, "forward, stage 1").endswith("%")
    assert row(text, "bubble").split()[-1] == "-"
    message = "(step within 10 %, memory predicted at most 1 % too low, 5 % too high, or 64.0 KiB off)"
    assert f"\nnot as predicted {message}" in text


def test_run_as_predicted_is_reported():
    found = verification_of(plan(), profile(), report(plan(), time_factor=1.05), TOLERANCE)
    assert "\nas predicted (step" in verification_text(found, WIDE)


def test_times_on_too_few_cores_are_not_judged():
    text = verification_text(verification(), WIDE)
    assert row(text, "step").endswith("+10.0 %")
    assert "times are not judged: the plan's processes need 3 cores, and this machine has 2" in text
    assert row(text, "peak memory, device 1").endswith("! OFF")


def test_calibration_is_shown():
    found = verification()
    assert "calibrated: compute x 1.1; executor 250 us; link 1.00 GB/s, 5.00 us; reserve " in verification_text(
        found, WIDE
    )
    alone = replace(found, calibration=replace(found.calibration, link=None))
    assert "link" not in verification_text(alone, WIDE)
