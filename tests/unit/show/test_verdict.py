"""Verdict on a plan as text."""

from planner.core.judge.verdict import Finding, Verdict, judge
from planner.show.terminal.verdict import verdict_text
from tests.unit.show.samples import MIB, interleaved, plan, profile, style, verdict

WIDE = style(120, wrap=False)


def test_verdict_of_a_plan_that_does_not_fit():
    lines = verdict_text(verdict(), WIDE).splitlines()
    assert lines[0].startswith('GP101 error: stage 0 ("[bold]stem[/bold]" to "block.0") needs ')
    assert lines[1].startswith("      hint: ")
    assert lines[2] == ""
    assert sum("! OVER" in line for line in lines) == 3
    assert lines[-1] == "does not fit (3 errors)"


def test_verdict_of_a_plan_that_fits():
    lines = verdict_text(verdict(cap=120 * MIB), WIDE).splitlines()
    assert lines[0] == "memory per stage"
    assert lines[-1] == "fits"


def test_interleaved_plan_is_judged_by_device():
    lines = verdict_text(verdict(of=interleaved()), WIDE).splitlines()
    assert lines[0].startswith("GP101 error: device 0 (stages 0, 3) needs ")
    bars = [line for line in lines if line.startswith("device ") and "! OVER" in line]
    assert [line.split()[1] for line in bars] == ["0", "1", "2"]
    assert lines[-1] == "does not fit (3 errors)"


def test_plan_with_warnings_fits():
    judged = judge(plan(), profile(), profile_digest="sha256:0", headroom=0.9)
    text = verdict_text(judged, WIDE)
    assert text.count("GP102 warning: ") == 3
    assert text.splitlines()[-1] == "fits (3 warnings)"


def test_verdict_of_a_plan_of_another_profile_has_no_bars():
    finding = Finding(code="GP202", severity="error", message="other layers", hint="solve again")
    text = verdict_text(Verdict(fits=False, findings=(finding,), plan=None), WIDE)
    assert text == "GP202 error: other layers\n      hint: solve again\n\ndoes not fit this profile (1 error)"


def test_finding_without_a_hint_has_no_empty_line():
    finding = Finding(code="GP203", severity="warning", message="edited")
    text = verdict_text(Verdict(fits=True, findings=(finding,), plan=None), WIDE)
    assert text == "GP203 warning: edited\n\nfits (1 warning)"
