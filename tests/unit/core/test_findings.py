"""Findings of `check`: their texts, and a plan that causes each of them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.errors import UsageError
from planner.core.judge.verdict import Verdict, judge, with_findings
from planner.core.values.findings import RULES, finding, rule_of_code
from planner.core.values.proof import Proof
from planner.core.values.units import format_us
from planner.show.gate import rules_markdown
from planner.solve import Request, solve
from tests.support import gate
from tests.support.profiles import profile_of


def _renamed() -> Verdict:
    was = gate.profile()
    other = replace(was, layers=(*was.layers[:-1], replace(was.layers[-1], name="head")))
    return planner.check(gate.plan(), profile=other)


def _edited() -> Verdict:
    plan = gate.plan()
    return planner.check(replace(plan, predicted=replace(plan.predicted, step_us=1.0)), profile=gate.profile())


def _slower() -> Verdict:
    layers = tuple(replace(layer, forward_us=(900.0,)) for layer in gate.profile().layers)
    before = gate.plan(replace(gate.profile(), layers=layers))
    return planner.check(gate.plan(), profile=gate.profile(), against=before)


def _another_model() -> Verdict:
    verdict = planner.check(gate.plan(), profile=gate.profile())
    return with_findings(verdict, [finding("GP301", 'layer "h.1" is new')])


def _verdict_with_proof(proof: Proof | None) -> Verdict:
    """Return the verdict on a plan with recomputation, for a profile with this equivalence check."""
    read = gate.profile()
    read = replace(read, model=replace(read.model, digest="sha256:0"), proof=proof)
    request = replace(gate.plan(read).inputs, recompute="always")
    plan = solve(replace(read, proof=None), Request(inputs=request, balance=(2, 2, 2)))
    digest = files.digest_of(read)
    return judge(plan, read, profile_digest=digest)


_RIGHT = Proof(layers=6, cuts=5, gradients=6)


def _boasting() -> Verdict:
    plan = gate.plan()
    slow = planner.solve(gate.profile(), devices=3, mem="2MB", batch=4, balance=(4, 1, 1), micro_batches=4)
    step_us = slow.predicted.step_us
    return planner.check(replace(slow, solver=replace(plan.solver, lower_bound_us=step_us)), profile=gate.profile())


def _large() -> Verdict:
    layers = tuple(replace(gate.profile().layers[0], name=f"h.{n}") for n in range(2500))
    large = replace(gate.profile(), layers=layers)
    plan = planner.solve(large, devices=10, mem="1GB", batch=4, balance=(250,) * 10)
    claimed = replace(plan.solver, status="optimal", lower_bound_us=plan.predicted.step_us)
    return planner.check(replace(plan, solver=claimed), profile=large)


def _estimated() -> Verdict:
    profile = replace(gate.profile(), device=replace(gate.profile().device, how="estimated"))
    return planner.check(gate.plan(profile), profile=profile)


def _extrapolated() -> Verdict:
    plan = planner.solve(gate.two_sizes(), devices=2, mem="4MB", batch=8, micro_batches=2, extrapolate=True)
    return planner.check(plan, profile=gate.two_sizes())


PROVOKED = {
    "GP101": lambda: planner.check(gate.plan(), profile=gate.profile(), mem="900kB"),
    "GP102": lambda: planner.check(gate.plan(), profile=gate.profile(), headroom="9%"),
    "GP103": lambda: planner.check(gate.plan(), profile=gate.profile(), mem="920kB"),
    "GP201": lambda: planner.check(gate.plan(), profile=gate.profile(widened=1)),
    "GP202": _renamed,
    "GP203": _edited,
    "GP204": lambda: planner.check(gate.plan(), profile=gate.profile(), device="h100"),
    "GP205": _boasting,
    "GP206": _large,
    "GP207": _estimated,
    "GP208": _extrapolated,
    "GP301": _another_model,
    "GP302": lambda: _verdict_with_proof(replace(_RIGHT, differs_recomputed='the buffer "1.count" differs by 5.0e-01')),
    "GP303": lambda: _verdict_with_proof(None),
    "GP304": lambda: _verdict_with_proof(
        replace(_RIGHT, layers=3, cuts=2, reason='from "h.3" on it takes more than 30 s here')
    ),
    "GP401": lambda: planner.check(gate.plan(gate.profile(1000)), profile=gate.profile(1000), against=gate.plan()),
    "GP402": _slower,
}


def test_every_finding_has_a_case_here() -> None:
    assert list(PROVOKED) == [known.code for known in RULES]


@pytest.mark.slow
@pytest.mark.parametrize("code", PROVOKED)
def test_findings_have_the_severity_of_their_rule(code: str) -> None:
    """Only errors make the answer no."""
    verdict = PROVOKED[code]()
    found = [each for each in verdict.findings if each.code == code]
    assert {each.severity for each in found} == {rule_of_code(code).severity}
    assert verdict.fits == all(each.severity != "error" for each in verdict.findings)


def test_unchanged_plan_has_no_findings() -> None:
    assert planner.check(gate.plan(), profile=gate.profile(), against=gate.plan()).findings == ()


def test_verified_stages_have_no_findings() -> None:
    assert not [found for found in _verdict_with_proof(_RIGHT).findings if found.code.startswith("GP3")]


def test_skipped_equivalence_check_is_reported_with_its_reason() -> None:
    (found,) = [
        f for f in _verdict_with_proof(Proof(layers=0, cuts=0, reason="it takes more")).findings if f.code == "GP303"
    ]
    assert "it takes more" in found.message


def test_strict_treats_warnings_but_not_notes_as_errors() -> None:
    assert not planner.check(gate.plan(), profile=gate.profile(), headroom="9%", strict=True).fits
    assert planner.check(gate.plan(), profile=gate.profile(), device="h100", strict=True).fits


@pytest.mark.parametrize("known", RULES, ids=lambda known: known.code)
def test_texts_of_rules_are_complete(known) -> None:
    assert re.fullmatch(r"GP[1-9]\d\d", known.code)
    assert known.title[0].islower()
    assert not known.title.endswith(".")
    assert len(known.title) < 60
    for text in (known.meaning, known.why, known.remedy):
        assert text.endswith(".")
        assert "  " not in text


def test_codes_ignore_case_and_typos_get_suggestions() -> None:
    assert rule_of_code("gp101").code == "GP101"
    with pytest.raises(UsageError, match="GP111") as refused:
        rule_of_code("GP111")
    assert "GP101" in refused.value.hint


def test_findings_page_matches_the_rules() -> None:
    """After a change, run `gpipe-plan explain --format markdown > docs/findings.md`."""
    page = Path(__file__).parents[3] / "docs" / "findings.md"
    assert page.read_text(encoding="utf-8") == rules_markdown(RULES)


def test_suggested_limit_and_cuts_fit() -> None:
    profile = gate.profile()
    plan = planner.solve(profile, devices=3, mem="1MB", batch=4, schedule="gpipe")
    verdict = planner.check(plan, profile=profile, mem="900kB")
    advised = re.search(r"the whole plan fits with `--mem (\S+)`", verdict.would_fit[0])
    assert planner.check(plan, profile=profile, mem=advised[1]).fits
    cuts = re.search(r"the cuts \[([\d, ]+)\] with M = (\d+)", verdict.would_fit[1])
    assert "--devices 3 --mem 900kB --batch 4 --schedule gpipe`" in verdict.would_fit[1]
    other = planner.solve(
        profile, devices=3, mem="900kB", batch=4, schedule="gpipe", balance=cuts[1], micro_batches=cuts[2]
    )
    assert max(other.peak_bytes_by_device()) <= 900_000


def test_suggested_command_uses_all_checked_memory() -> None:
    """For an estimate, `solve` would keep headroom by default."""
    profile = replace(gate.profile(), device=replace(gate.profile().device, how="estimated"))
    plan = planner.solve(profile, devices=3, mem="1MB", batch=4, schedule="gpipe", headroom="0%")
    verdict = planner.check(plan, profile=profile, mem="900kB")
    assert "--devices 3 --mem 900kB --headroom 0% --batch 4 --schedule gpipe" in verdict.would_fit[1]


@pytest.mark.parametrize(("schedule", "chunks"), [("auto", "auto"), ("interleaved", "auto"), ("interleaved", "2")])
def test_suggested_cuts_of_chunks_work_as_options(schedule: str, chunks: str) -> None:
    profile = profile_of([10.0] * 12, [20.0] * 12, saved_bytes=100)
    plan = planner.solve(profile, devices=2, mem=20_000, batch=8, schedule=schedule, chunks=chunks)
    assert plan.chunks > 1
    cap = max(plan.peak_bytes_by_device()) - 1
    _, advice = planner.check(plan, profile=profile, mem=cap).would_fit
    suggested = re.search(
        r"cuts \[([\d, ]+)\] with M = (\d+), `--schedule (\w+) --chunks (\d)`, (\S+ \S+) per step .*: `(.*)`", advice
    )
    assert suggested is not None, advice
    other = planner.solve(
        profile,
        devices=2,
        mem=cap,
        batch=8,
        balance=suggested[1],
        micro_batches=suggested[2],
        schedule=suggested[3],
        chunks=suggested[4],
    )
    assert max(other.peak_bytes_by_device()) <= cap
    assert format_us(other.predicted.step_us) == suggested[5]
    assert ("--chunks 2" in suggested[6]) == (chunks == "2")


def test_large_plans_get_a_device_suggestion() -> None:
    big = gate.profile(widened=10 * 10**9)
    verdict = planner.check(gate.plan(), profile=big)
    assert "`--device rtx3090` has" in verdict.would_fit[0] or "`--device a10` has" in verdict.would_fit[0]
    card = re.search(r"--device (\S+)` has", verdict.would_fit[0])
    assert planner.check(gate.plan(), profile=big, device=card[1]).exceeds_limit is False


def test_comparison_of_plans_with_different_numbers_of_stages() -> None:
    two = planner.solve(gate.profile(), devices=2, mem="2MB", batch=4, schedule="gpipe")
    difference = planner.check(gate.plan(), profile=gate.profile(), against=two).difference
    assert [stage.bytes_before is None for stage in difference.stages] == [False, False, True]
    assert difference.stages[2].bytes == gate.plan().stages[2].memory.total
    assert difference.stages[2].more_bytes == 0


def test_verdict_file_has_difference_and_suggestions(tmp_path: Path) -> None:
    text = files.dump(gate.over_the_cap(), as_json=True)
    assert '"would_fit": [' in text
    assert '"difference": {' in text


def test_large_plans_are_not_solved_again() -> None:
    """A check answers at once, so only the limit is suggested for thousands of layers."""
    layers = tuple(replace(gate.profile().layers[0], name=f"h.{n}") for n in range(2500))
    large = replace(gate.profile(), layers=layers)
    plan = planner.solve(large, devices=10, mem="1GB", batch=4, balance=(250,) * 10)
    assert len(planner.check(plan, profile=large, mem="1MB").would_fit) == 1
