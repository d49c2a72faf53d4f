"""Every finding that `check` knows: its texts, and a plan that provokes it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from planner import api, files
from planner.core.errors import UsageError
from planner.core.judge.verdict import Verdict, judge, with_findings
from planner.core.values.findings import RULES, finding, rule
from planner.core.values.proof import Proof
from planner.core.values.units import format_us
from planner.show.gate import rules_markdown
from planner.solve import Request, solve
from tests.support import gate
from tests.support.profiles import profile_of


def _renamed() -> Verdict:
    was = gate.profile()
    other = replace(was, layers=(*was.layers[:-1], replace(was.layers[-1], name="head")))
    return api.check(gate.plan(), profile=other)


def _edited() -> Verdict:
    plan = gate.plan()
    return api.check(replace(plan, predicted=replace(plan.predicted, step_us=1.0)), profile=gate.profile())


def _slower() -> Verdict:
    layers = tuple(replace(layer, forward_us=(900.0,)) for layer in gate.profile().layers)
    before = gate.plan(replace(gate.profile(), layers=layers))
    return api.check(gate.plan(), profile=gate.profile(), against=before)


def _another_model() -> Verdict:
    verdict = api.check(gate.plan(), profile=gate.profile())
    return with_findings(verdict, [finding("GP301", 'layer "h.1" is new')])


def _proven(proof: Proof | None) -> Verdict:
    """What `check` says of a plan that recomputes, of a model that was profiled with this result."""
    read = gate.profile()
    read = replace(read, model=replace(read.model, digest="sha256:0"), proof=proof)
    request = replace(gate.plan(read).inputs, recompute="always")
    plan = solve(replace(read, proof=None), Request(inputs=request, balance=(2, 2, 2)))
    digest = files.digest_of(read)
    return judge(plan, read, profile_digest=digest)


_RIGHT = Proof(layers=6, cuts=5, gradients=6)


def _boasting() -> Verdict:
    plan = gate.plan()
    slow = api.solve(gate.profile(), devices=3, mem="2MB", batch=4, balance=(4, 1, 1), micro_batches=4)
    step_us = slow.predicted.step_us
    return api.check(replace(slow, solver=replace(plan.solver, lower_bound_us=step_us)), profile=gate.profile())


def _large() -> Verdict:
    layers = tuple(replace(gate.profile().layers[0], name=f"h.{n}") for n in range(2500))
    large = replace(gate.profile(), layers=layers)
    plan = api.solve(large, devices=10, mem="1GB", batch=4, balance=(250,) * 10)
    claimed = replace(plan.solver, status="optimal", lower_bound_us=plan.predicted.step_us)
    return api.check(replace(plan, solver=claimed), profile=large)


def _estimated() -> Verdict:
    profile = replace(gate.profile(), device=replace(gate.profile().device, how="estimated"))
    return api.check(gate.plan(profile), profile=profile)


def _extrapolated() -> Verdict:
    plan = api.solve(gate.two_sizes(), devices=2, mem="4MB", batch=8, micro_batches=2, extrapolate=True)
    return api.check(plan, profile=gate.two_sizes())


PROVOKED = {
    "GP101": lambda: api.check(gate.plan(), profile=gate.profile(), mem="900kB"),
    "GP102": lambda: api.check(gate.plan(), profile=gate.profile(), headroom="9%"),
    "GP103": lambda: api.check(gate.plan(), profile=gate.profile(), mem="920kB"),
    "GP201": lambda: api.check(gate.plan(), profile=gate.profile(widened=1)),
    "GP202": _renamed,
    "GP203": _edited,
    "GP204": lambda: api.check(gate.plan(), profile=gate.profile(), device="h100"),
    "GP205": _boasting,
    "GP206": _large,
    "GP207": _estimated,
    "GP208": _extrapolated,
    "GP301": _another_model,
    "GP302": lambda: _proven(replace(_RIGHT, differs_recomputed='the buffer "1.count" differs by 5.0e-01')),
    "GP303": lambda: _proven(None),
    "GP304": lambda: _proven(replace(_RIGHT, layers=3, cuts=2, reason='from "h.3" on it takes more than 30 s here')),
    "GP401": lambda: api.check(gate.plan(gate.profile(1000)), profile=gate.profile(1000), against=gate.plan()),
    "GP402": _slower,
}


def test_every_finding_is_provoked_somewhere() -> None:
    """A new code needs a case here."""
    assert list(PROVOKED) == [known.code for known in RULES]


@pytest.mark.parametrize("code", PROVOKED)
def test_a_finding_has_the_severity_of_its_rule_and_decides_accordingly(code: str) -> None:
    """Found where it should be; errors alone make the answer no."""
    verdict = PROVOKED[code]()
    found = [each for each in verdict.findings if each.code == code]
    assert {each.severity for each in found} == {rule(code).severity}
    assert verdict.fits == all(each.severity != "error" for each in verdict.findings)


def test_nothing_is_found_in_a_plan_that_is_as_it_was() -> None:
    """Not even a note."""
    assert api.check(gate.plan(), profile=gate.profile(), against=gate.plan()).findings == ()


def test_a_plan_of_proven_stages_is_found_nothing_of() -> None:
    """What was proven of the model it is of."""
    assert not [found for found in _proven(_RIGHT).findings if found.code.startswith("GP3")]


def test_stages_that_could_not_be_run_are_as_good_as_not_held_against_the_model() -> None:
    """The finding says why."""
    (found,) = [f for f in _proven(Proof(layers=0, cuts=0, reason="it takes more")).findings if f.code == "GP303"]
    assert "it takes more" in found.message


def test_strict_counts_warnings_and_no_notes() -> None:
    """GP102 then makes the answer no, GP204 does not."""
    assert not api.check(gate.plan(), profile=gate.profile(), headroom="9%", strict=True).fits
    assert api.check(gate.plan(), profile=gate.profile(), device="h100", strict=True).fits


@pytest.mark.parametrize("known", RULES, ids=lambda known: known.code)
def test_the_texts_of_a_rule_are_complete(known) -> None:
    """A code, a short title in the house's style, and three explanations."""
    assert re.fullmatch(r"GP[1-9]\d\d", known.code)
    assert known.title[0].islower()
    assert not known.title.endswith(".")
    assert len(known.title) < 60
    for text in (known.meaning, known.why, known.remedy):
        assert text.endswith(".")
        assert "  " not in text


def test_codes_are_looked_up_in_any_case_and_typos_are_helped() -> None:
    """`gp101` is GP101; GP110 is nothing, and the hint says what is near."""
    assert rule("gp101").code == "GP101"
    with pytest.raises(UsageError, match="GP111") as refused:
        rule("GP111")
    assert "GP101" in refused.value.hint


def test_the_page_of_findings_is_made_from_the_table() -> None:
    """`gpipe-plan explain --format markdown > docs/findings.md` after a change."""
    page = Path(__file__).parents[3] / "docs" / "findings.md"
    assert page.read_text(encoding="utf-8") == rules_markdown(RULES)


def test_what_would_fit_is_true() -> None:
    """The cap that is advised fits; so do the cuts that are advised, under the cap that was asked for."""
    profile = gate.profile()
    plan = api.solve(profile, devices=3, mem="1MB", batch=4, schedule="gpipe")
    verdict = api.check(plan, profile=profile, mem="900kB")
    advised = re.search(r"the whole plan fits with `--mem (\S+)`", verdict.would_fit[0])
    assert advised is not None
    assert api.check(plan, profile=profile, mem=advised[1]).fits
    cuts = re.search(r"the cuts \[([\d, ]+)\] with M = (\d+)", verdict.would_fit[1])
    assert cuts is not None
    assert "--devices 3 --mem 900kB --batch 4 --schedule gpipe`" in verdict.would_fit[1]
    other = api.solve(
        profile, devices=3, mem="900kB", batch=4, schedule="gpipe", balance=cuts[1], micro_batches=cuts[2]
    )
    assert max(other.device_bytes()) <= 900_000


def test_the_advised_command_uses_all_memory_that_was_checked() -> None:
    """Of an estimate, `solve` would keep some of it free by default."""
    profile = replace(gate.profile(), device=replace(gate.profile().device, how="estimated"))
    plan = api.solve(profile, devices=3, mem="1MB", batch=4, schedule="gpipe", headroom="0%")
    verdict = api.check(plan, profile=profile, mem="900kB")
    assert "--devices 3 --mem 900kB --headroom 0% --batch 4 --schedule gpipe" in verdict.would_fit[1]


@pytest.mark.parametrize(("schedule", "chunks"), [("auto", "auto"), ("interleaved", "auto"), ("interleaved", "2")])
def test_cuts_for_several_stages_on_a_device_can_be_typed_as_they_are_advised(schedule: str, chunks: str) -> None:
    """With the schedule and chunks that the advice names, also where `auto` chose them."""
    profile = profile_of([10.0] * 12, [20.0] * 12, saved_bytes=100)
    plan = api.solve(profile, devices=2, mem=20_000, batch=8, schedule=schedule, chunks=chunks)
    assert plan.chunks > 1
    cap = max(plan.device_bytes()) - 1
    _, advice = api.check(plan, profile=profile, mem=cap).would_fit
    told = re.search(
        r"cuts \[([\d, ]+)\] with M = (\d+), `--schedule (\w+) --chunks (\d)`, (\S+ \S+) per step .*: `(.*)`", advice
    )
    assert told is not None, advice
    other = api.solve(
        profile,
        devices=2,
        mem=cap,
        batch=8,
        balance=told[1],
        micro_batches=told[2],
        schedule=told[3],
        chunks=told[4],
    )
    assert max(other.device_bytes()) <= cap
    assert format_us(other.predicted.step_us) == told[5]
    assert ("--chunks 2" in told[6]) == (chunks == "2")


def test_a_device_is_named_where_it_matters() -> None:
    """For plans of gigabytes: the smallest known card that holds it."""
    big = gate.profile(widened=10 * 10**9)
    verdict = api.check(gate.plan(), profile=big)
    assert "`--device rtx3090` has" in verdict.would_fit[0] or "`--device a10` has" in verdict.would_fit[0]
    card = re.search(r"--device (\S+)` has", verdict.would_fit[0])
    assert card is not None
    assert api.check(gate.plan(), profile=big, device=card[1]).is_over is False


def test_a_comparison_survives_other_stage_counts() -> None:
    """Stages that only one plan has are shown with what there is."""
    two = api.solve(gate.profile(), devices=2, mem="2MB", batch=4, schedule="gpipe")
    difference = api.check(gate.plan(), profile=gate.profile(), against=two).difference
    assert difference is not None
    assert [stage.bytes_before is None for stage in difference.stages] == [False, False, True]
    assert difference.stages[2].bytes == gate.plan().stages[2].memory.total
    assert difference.stages[2].more_bytes == 0


def test_the_verdict_is_written_with_what_it_found(tmp_path: Path) -> None:
    """JSON holds the difference and what would fit."""
    text = files.dump(gate.over_the_cap(), as_json=True)
    assert '"would_fit": [' in text
    assert '"difference": {' in text


def test_a_large_plan_is_not_solved_again() -> None:
    """A gate answers at once: of thousands of layers only the cap that would do is told."""
    layers = tuple(replace(gate.profile().layers[0], name=f"h.{n}") for n in range(2500))
    large = replace(gate.profile(), layers=layers)
    plan = api.solve(large, devices=10, mem="1GB", batch=4, balance=(250,) * 10)
    assert len(api.check(plan, profile=large, mem="1MB").would_fit) == 1
