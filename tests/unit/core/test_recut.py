"""Plans with changed cuts."""

from dataclasses import replace

import pytest

from planner.core.errors import UsageError
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import judge
from planner.core.values.plan import Plan, RecomputePolicy, ScheduleName
from planner.files import digest_of
from planner.solve import Request, solve
from tests.support.profiles import inputs_of, profile_of

PROFILE = profile_of([10, 20, 30, 40, 50, 60], [20] * 6, parameter_bytes=100, saved_bytes=50, output_bytes=10)


def plan_of(
    *,
    cap: int | tuple[int, ...] = 10**9,
    devices: int = 3,
    recompute: RecomputePolicy = "auto",
    schedule: ScheduleName = "gpipe",
    chunks: int = 1,
) -> Plan:
    """Return the best plan for three devices and four micro-batches."""
    inputs = inputs_of(devices, 4, memory_bytes=cap, recompute=recompute)
    inputs = replace(
        inputs, schedule=schedule, chunks=chunks, profile=replace(inputs.profile, digest=digest_of(PROFILE))
    )
    return solve(PROFILE, Request(inputs=inputs, micro_batches=4))


@pytest.mark.parametrize("recompute", ["auto", "never", "except-last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_unchanged_cuts_give_the_same_plan(recompute: RecomputePolicy, schedule: ScheduleName) -> None:
    """Only the certificate is dropped."""
    plan = plan_of(recompute=recompute, schedule=schedule)
    again = with_cuts(plan, PROFILE, plan.balance)
    assert again.solver.status == "given"
    assert replace(again, solver=plan.solver) == plan


@pytest.mark.parametrize("balance", [(6,), (1, 5), (2, 2, 2), (1, 1, 4)])
def test_changed_cuts_equal_solve_with_balance(balance: tuple[int, ...]) -> None:
    plan = plan_of()
    again = with_cuts(plan, PROFILE, balance)
    solved = solve(PROFILE, Request(inputs=plan.inputs, balance=balance, micro_batches=4))
    assert (again.balance, again.stages, again.predicted) == (solved.balance, solved.stages, solved.predicted)
    assert judge(again, PROFILE, profile_digest=digest_of(PROFILE), strict=True).fits


def test_recomputation_follows_the_memory_limit() -> None:
    """If no choice fits, the one with the lowest peak is used."""
    plan = plan_of()
    free = with_cuts(plan, PROFILE, (1, 5))
    assert [stage.recompute for stage in free.stages] == ["never", "never"]
    cap = free.stages[1].memory.total - 1
    tight = with_cuts(plan, PROFILE, (1, 5), memory_bytes=(cap,) * 3)
    assert tight.stages[0].recompute == "never"
    assert tight.stages[1].recompute in ("except-last", "always")
    assert tight.stages[1].memory.total <= cap
    assert tight.inputs.memory_bytes == (cap,) * 3
    hopeless = with_cuts(plan, PROFILE, (1, 5), memory_bytes=(1,) * 3)
    assert hopeless.stages[1].memory.total <= tight.stages[1].memory.total
    verdict = judge(hopeless, PROFILE, profile_digest=digest_of(PROFILE))
    assert [finding.code for finding in verdict.findings] == ["GP101", "GP101"]
    kept = with_cuts(plan_of(recompute="never"), PROFILE, (1, 5), memory_bytes=(1,) * 3)
    assert {stage.recompute for stage in kept.stages} == {"never"}


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ((2, 3), "adds up to 5 layers, the profile has 6"),
        ((6, 0), "at least one layer"),
        ((1, 1, 1, 3), "4 stages need 4 devices, there are 3"),
    ],
)
def test_invalid_cuts_are_refused(balance: tuple[int, ...], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        with_cuts(plan_of(), PROFILE, balance)


def test_chunks_of_a_device_have_the_same_recomputation() -> None:
    plan = plan_of(schedule="interleaved", devices=2, chunks=2)
    assert plan.chunks == 2
    again = with_cuts(plan, PROFILE, plan.balance)
    assert replace(again, solver=plan.solver) == plan
