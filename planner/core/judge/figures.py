"""The derived figures of a plan, as written beside as recomputed: which of them are not the profile's."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from planner.core.values.plan import Plan, SolverReport

if TYPE_CHECKING:
    from planner.core.judge.verdict import Verdict


def is_same(name: str, written: float, computed: float) -> bool:
    """Whether two figures are one, as files round them: times to 0.1 us, others to six digits behind the point."""
    slack = 0.1 if name.endswith("_us") else 2e-6
    return abs(written - computed) <= slack + 1e-6 * abs(computed)


def claimed_of(written: Plan, verdict: "Verdict") -> SolverReport | None:
    """The certificate of a plan that can be looked into: its own where the cuts are as they were, or None.

    The verdict is that on the plan as written, against its profile.
    """
    now, codes = verdict.plan, {each.code for each in verdict.findings}
    if now is None or codes & {"GP101", "GP201"} or now.inputs != written.inputs:
        return None
    claimed = written.solver if written.solver.status == now.solver.status else now.solver
    is_bare = claimed.status == "given" and not (written.frontier or claimed.gap or claimed.lower_bound_us)
    return None if is_bare else claimed


def differing(plan: Plan, now: Plan) -> tuple[str, ...]:
    """The figures of `plan` that its profile does not give, by their places in the file; decisions are left out."""
    places = [*_differing(plan.predicted, now.predicted, "predicted")]
    for k, (written, computed) in enumerate(zip(plan.stages, now.stages, strict=True)):
        places += _differing(written, computed, f"stages[{k}]")
    return tuple(places)


def certificate_problems(plan: Plan, solver: SolverReport) -> tuple[str, ...]:
    """What a solver's report says that cannot be, of a plan with such a step time."""
    step_us, bound_us = plan.predicted.step_us, solver.lower_bound_us
    problems = []
    if solver.status == "given":
        if solver.gap or bound_us:
            problems.append("cuts that were given have neither gap nor bound")
        return tuple(problems)
    if bound_us > step_us and not is_same("lower_bound_us", bound_us, step_us):
        problems.append(f"the bound of {bound_us / 1e3:.1f} ms is above the step of {step_us / 1e3:.1f} ms")
    gap = max(0.0, 1 - bound_us / step_us) if step_us else 0.0
    # The step and its bound are rounded to 0.1 us, which shows in the gap of very short steps.
    if abs(gap - solver.gap) > 2e-6 + (0.2 / step_us if step_us else 0.0):
        problems.append(f"a gap of {solver.gap:.4%} is written, step and bound give {gap:.4%}")
    if solver.status == "optimal" and solver.gap > 0:
        problems.append(f"it is called optimal with a gap of {solver.gap:.4%}")
    for point in plan.frontier:
        faster = point.fits and point.step_us < step_us and not is_same("step_us", point.step_us, step_us)
        if solver.status == "optimal" and faster:
            problems.append(f"M = {point.micro_batches} in its frontier is faster than what is called optimal")
    return tuple(problems)


def _differing(written: Any, computed: Any, at: str) -> Iterator[str]:
    for each in fields(written):
        one, other = getattr(written, each.name), getattr(computed, each.name)
        if is_dataclass(one):
            yield from _differing(one, other, f"{at}.{each.name}")
        elif isinstance(one, (int, float)) and isinstance(other, (int, float)) and not is_same(each.name, one, other):
            yield f"{at}.{each.name}"
