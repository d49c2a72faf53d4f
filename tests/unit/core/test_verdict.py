"""Verdicts of `judge`, which recomputes a plan from the profile and trusts none of its numbers."""

from dataclasses import replace
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.judge.certainty import certainty_of, headroom_for
from planner.core.judge.verdict import Verdict, judge
from planner.core.values.cluster import Link
from planner.core.values.plan import Plan, StageMemory
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from tests.support.chains import chain, layer
from tests.support.profiles import inputs_of

DIGEST = "sha256:0"


def six_layers(**changes: Any) -> Profile:
    """Return equal layers with 100 bytes each of parameters and gradients, and 50 saved per micro-batch."""
    values = {"parameter_bytes": 100, "forward_us": 10.0, "backward_us": 20.0, "output_bytes": 20, "saved_bytes": 50}
    return chain(*(layer(f"h.{n}", **{**values, **changes}) for n in range(6)))


def plan_of(profile: Profile | None = None, **options: Any) -> Plan:
    """Return a plan with three stages of two layers and M = 4."""
    given = six_layers() if profile is None else profile
    return solve(given, Request(inputs=inputs_of(3, 4, **options), balance=(2, 2, 2)))


def codes(verdict: Verdict) -> list[tuple[str, str, int | None]]:
    """Return code, severity and stage of findings, except GP103: limits of a few bytes lie in every error range."""
    found = [finding for finding in verdict.findings if finding.code != "GP103"]
    return [(finding.code, finding.severity, finding.stage) for finding in found]


# Parameters, gradients: 200 each. In flight 4·(20 + 100) on stages 1 and 2, transfer 40 and 20.
MIDDLE = 400 + 4 * 120 + 40
LAST = 400 + 4 * 120 + 20
FIRST = 400 + 4 * 100 + 20


def test_new_plan_fits_without_findings() -> None:
    plan = plan_of()
    assert [stage.memory.total for stage in plan.stages] == [FIRST, MIDDLE, LAST]
    verdict = judge(plan, six_layers(), profile_digest=DIGEST)
    assert (verdict.fits, verdict.findings, verdict.plan, verdict.memory) == (True, (), plan, "fits")


def test_optimal_plan_keeps_its_certificate() -> None:
    plan = solve(six_layers(), Request(inputs=inputs_of(3, 4, memory_bytes=2000)))
    verdict = judge(plan, six_layers(), profile_digest=DIGEST)
    assert verdict.fits
    assert verdict.plan == plan
    assert plan.solver.status == "optimal"


def test_every_stage_over_its_limit_is_an_error() -> None:
    plan = plan_of()
    verdict = judge(plan, six_layers(), profile_digest=DIGEST, memory_bytes=(FIRST, MIDDLE - 1, 500))
    assert not verdict.fits
    assert codes(verdict) == [("GP101", "error", 1), ("GP101", "error", 2)]
    assert '"h.2" to "h.3"' in verdict.findings[0].message
    assert "needs 920 B, 1 B over its limit of 919 B" in verdict.findings[0].message
    assert "400 B over its limit of 500 B" in verdict.findings[1].message
    assert all("--mem" in finding.hint for finding in verdict.findings[:2])


def test_stage_exactly_at_its_limit_fits() -> None:
    verdict = judge(plan_of(), six_layers(), profile_digest=DIGEST, memory_bytes=(FIRST, MIDDLE, LAST))
    assert verdict.fits
    assert codes(verdict) == []


def test_too_little_headroom_is_a_warning() -> None:
    caps = (FIRST * 2, 950, 950)  # 920 of 950 is 3.2 % free, 900 of 950 is 5.3 %
    verdict = judge(plan_of(), six_layers(), profile_digest=DIGEST, memory_bytes=caps, headroom=0.05)
    assert verdict.fits
    assert codes(verdict) == [("GP102", "warning", 1)]
    assert "leaves 3.2% of 950 B free" in verdict.findings[0].message
    assert "5%" in verdict.findings[0].hint


def test_a_limit_within_the_error_range_is_tight() -> None:
    """GP103 is reported for devices whose largest expected peak exceeds their memory."""
    large = six_layers(parameter_bytes=10**8)
    plan = plan_of(large)
    needs = plan.peak_bytes_by_device()
    most = certainty_of(plan, large).device_bytes
    tight = judge(plan, large, profile_digest=DIGEST, memory_bytes=(most[0], needs[1], most[2]))
    assert tight.fits
    assert tight.memory == "tight"
    assert [(found.code, found.stage) for found in tight.findings] == [("GP103", 1)]
    share = headroom_for(large, most)
    kept = replace(plan, inputs=replace(plan.inputs, memory_bytes=needs, headroom=share))
    assert judge(kept, large, profile_digest=DIGEST).memory == "fits"
    over = judge(plan, large, profile_digest=DIGEST, memory_bytes=(needs[0], needs[1] - 1, needs[2]))
    assert over.memory == "does not fit"


def test_stage_over_its_limit_has_one_finding() -> None:
    verdict = judge(plan_of(), six_layers(), profile_digest=DIGEST, memory_bytes=(900,) * 3, headroom=0.01)
    assert codes(verdict) == [("GP101", "error", 1), ("GP102", "warning", 2)]


def test_limits_of_the_plan_are_judged_by_default() -> None:
    plan = plan_of()
    tight = replace(plan, inputs=replace(plan.inputs, memory_bytes=(10**6, 900, 10**6)))
    verdict = judge(tight, six_layers(), profile_digest=DIGEST)
    assert ("GP101", "error", 1) in codes(verdict)
    assert not verdict.fits


def test_recomputed_plan_has_the_overriding_limits() -> None:
    verdict = judge(plan_of(), six_layers(), profile_digest=DIGEST, memory_bytes=(5000, 6000, 7000))
    assert [stage.memory_bytes for stage in verdict.plan.stages] == [5000, 6000, 7000]
    assert verdict.plan.inputs.memory_bytes == (5000, 6000, 7000)


def test_changed_profile_makes_the_plan_stale() -> None:
    """Memory is judged by the new profile."""
    plan = plan_of(memory_bytes=1000)
    now = six_layers(parameter_bytes=150)
    verdict = judge(plan, now, profile_digest="sha256:ffff0000ffff0000")
    assert not verdict.fits
    assert codes(verdict) == [
        ("GP201", "error", None),
        ("GP101", "error", 0),
        ("GP101", "error", 1),
        ("GP101", "error", 2),
    ]
    assert "sha256:0" in verdict.findings[0].message
    assert "sha256:ffff0000ffff" in verdict.findings[0].message
    assert "gpipe-plan solve profile.yaml --devices 3" in verdict.findings[0].hint
    assert verdict.plan.stages[0].memory.parameters == 300


def test_stale_plan_with_another_number_of_layers_has_two_findings() -> None:
    shorter = replace(six_layers(), layers=six_layers().layers[:5])
    verdict = judge(plan_of(), shorter, profile_digest="sha256:1")
    assert codes(verdict) == [("GP201", "error", None), ("GP202", "error", None)]
    assert "cuts 6 layers, the profile has 5" in verdict.findings[1].message
    assert verdict.plan is None


def test_plan_with_an_unprofiled_micro_batch_size_is_stale() -> None:
    """The answer is no (exit 1) instead of bad usage (exit 2), because the profile was repeated with other sizes."""
    now = replace(six_layers(), micro_batch_sizes=(8,))
    verdict = judge(plan_of(), now, profile_digest="sha256:1")
    assert not verdict.fits
    assert ("GP201", "error", None) in codes(verdict)


def test_renamed_layer_is_an_error() -> None:
    plan = plan_of()
    layers = [replace(x, name=x.name.replace("h.2", "blocks.2")) for x in six_layers().layers]
    verdict = judge(plan, chain(*layers), profile_digest="sha256:1")
    assert codes(verdict) == [("GP201", "error", None), ("GP202", "error", 1)]
    assert '"h.2"' in verdict.findings[1].message
    assert '"blocks.2"' in verdict.findings[1].hint
    assert verdict.plan is None
    assert not verdict.fits


def test_unknown_layer_name_in_the_plan_is_an_error() -> None:
    plan = plan_of()
    stages = (plan.stages[0], replace(plan.stages[1], last="h.33"), plan.stages[2])
    verdict = judge(replace(plan, stages=stages), six_layers(), profile_digest=DIGEST)
    assert codes(verdict) == [("GP202", "error", 1)]


def test_edited_balance_is_recomputed() -> None:
    plan = replace(plan_of(), balance=(1, 4, 1))
    verdict = judge(plan, six_layers(), profile_digest=DIGEST)
    assert verdict.fits
    assert codes(verdict) == [("GP203", "warning", None)]
    assert "memory differs in stage 0, 1, 2" in verdict.findings[0].message
    assert [(s.first, s.last, s.layers) for s in verdict.plan.stages] == [
        ("h.0", "h.0", 1),
        ("h.1", "h.4", 4),
        ("h.5", "h.5", 1),
    ]
    assert verdict.plan.stages[1].forward_us == 40.0
    assert verdict.plan.predicted.step_us == (60 + 3 * 40) + (120 + 3 * 80)
    assert verdict.plan.stages[1].memory.parameters == 400


def test_edited_balance_that_does_not_fit_is_an_error() -> None:
    plan = replace(plan_of(memory_bytes=1000), balance=(1, 4, 1))
    verdict = judge(plan, six_layers(), profile_digest=DIGEST)
    assert not verdict.fits
    assert codes(verdict) == [("GP101", "error", 1), ("GP203", "warning", None)]


def test_edited_recomputation_is_recomputed() -> None:
    plan = plan_of()
    stages = (plan.stages[0], replace(plan.stages[1], recompute="always"), plan.stages[2])
    verdict = judge(replace(plan, stages=stages), six_layers(), profile_digest=DIGEST)
    assert codes(verdict) == [("GP203", "warning", None)]
    assert verdict.plan.stages[1].backward_us == 60.0
    assert verdict.plan.stages[1].memory.in_flight == 4 * 40


def test_edited_micro_batches_are_recomputed() -> None:
    values = {"forward_us": (1.0, 2.0), "backward_us": (2.0, 4.0), "output_bytes": (0, 0), "saved_bytes": (10, 20)}
    profile = chain(*(layer(f"h.{n}", **values) for n in range(6)), sizes=(1, 2))
    plan = solve(profile, Request(inputs=inputs_of(3, 4), balance=(2, 2, 2), micro_batches=4))
    edited = replace(plan, micro_batches=2, micro_batch_size=2)
    verdict = judge(edited, profile, profile_digest=DIGEST)
    assert codes(verdict) == [("GP203", "warning", None)]
    assert verdict.plan.predicted.step_us == (2 + 2) * 4 * 3


@pytest.mark.parametrize("factor", [0.5, 1.01, 2.0])
def test_edited_prediction_is_recomputed(factor: float) -> None:
    plan = plan_of()
    step_us = plan.predicted.step_us
    edited = replace(plan, predicted=replace(plan.predicted, step_us=step_us * factor))
    verdict = judge(edited, six_layers(), profile_digest=DIGEST)
    assert codes(verdict) == [("GP203", "warning", None)]
    assert verdict.fits
    assert verdict.plan.predicted.step_us == step_us


def test_edited_memory_is_recomputed() -> None:
    plan = plan_of(memory_bytes=10**6)
    stages = tuple(replace(stage, memory=StageMemory(), memory_bytes=1) for stage in plan.stages)
    edited = replace(plan, stages=stages)
    assert codes(judge(edited, six_layers(), profile_digest=DIGEST)) == [("GP203", "warning", None)]
    over = judge(edited, six_layers(), profile_digest=DIGEST, memory_bytes=(100,) * 3)
    assert [code for code, _, _ in codes(over)] == ["GP101"] * 3


def test_rounded_times_are_not_reported() -> None:
    """A plan file stores times to 0.1 us."""
    plan = plan_of(six_layers(forward_us=10.03, backward_us=20.07))
    written = replace(plan.predicted, step_us=round(plan.predicted.step_us, 1))
    verdict = judge(
        replace(plan, predicted=written),
        six_layers(forward_us=10.03, backward_us=20.07),
        profile_digest=DIGEST,
    )
    assert codes(verdict) == []


@pytest.mark.parametrize(
    ("balance", "said"), [((2, 2, 1), "adds up to 5"), ((3, 3, 3), "adds up to 9"), ((0, 3, 3), "at least one")]
)
def test_invalid_cuts_are_bad_usage(balance: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        judge(replace(plan_of(), balance=balance), six_layers(), profile_digest=DIGEST)


def test_limits_for_another_number_of_devices_are_bad_usage() -> None:
    with pytest.raises(UsageError):
        judge(plan_of(), six_layers(), profile_digest=DIGEST, memory_bytes=(10**6, 10**6))


def test_links_reserve_and_overhead_of_the_plan_are_used() -> None:
    inputs: dict[str, Any] = {"link": Link(latency_us=4.0), "reserve_bytes": 77, "overhead_us": 0.5}
    plan = plan_of(**inputs)
    verdict = judge(plan, six_layers(), profile_digest=DIGEST)
    assert codes(verdict) == []
    assert verdict.plan.stages[0].memory.reserve == 77
    assert verdict.plan.predicted.step_us == (3 + 3) * (20.5 + 40.5) + 4 * 4.0


def test_memory_of_v_chunks_is_added_up_by_device() -> None:
    inputs = replace(inputs_of(2, 4), schedule="zbv", chunks=2)
    plan = solve(six_layers(), Request(inputs=inputs, balance=(3, 1, 1, 1), micro_batches=4))
    needs = plan.peak_bytes_by_device()
    verdict = judge(plan, six_layers(), profile_digest=DIGEST, memory_bytes=needs)
    assert verdict.fits
    assert plan.stages[0].memory.total + plan.stages[2].memory.total != needs[0]
    verdict = judge(plan, six_layers(), profile_digest=DIGEST, memory_bytes=(needs[0] - 1, needs[1]))
    assert "device 0 (stages 0, 3)" in verdict.findings[0].message
