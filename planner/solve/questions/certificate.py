"""Check of a plan's claims by solving its request again within seconds.

The claims are its status (optimal or not), its gap and its lower bounds.
"""

from dataclasses import replace

from planner.core.errors import MissingPackageError, PlannerError, SolverError
from planner.core.judge.verdict import Verdict, certificate_problems, checkable_report, is_equal_rounded, with_findings
from planner.core.schedule import SEARCHED
from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Plan, SolverReport
from planner.core.values.profile import Profile
from planner.solve.request import Request
from planner.solve.search import MOST_WORK, solve

_TIME_LIMIT_S = 5.0
"""Time limit in seconds of each search that verifies the status or the lower bound of a plan."""

_ACTIONS = 30_000
"""Number of actions simulated per schedule, if the plan does not claim to be optimal: some tenths of a second."""

_HINT = "solve again to recompute these values"


def check_certificate(written: Plan, verdict: Verdict, profile: Profile) -> Verdict:
    """Return the verdict with findings about the plan's status, gap and lower bounds.

    If one of them is wrong, the plan in the returned verdict has the status `given` and no lower bound.

    Args:
        written: The plan as read from its file.
        verdict: The verdict on this plan.
        profile: The profile that the plan was judged with.
    """
    claimed = checkable_report(written, verdict)
    if verdict.plan is None or claimed is None:
        return verdict
    now = replace(verdict.plan, solver=claimed)
    findings = _findings(written, now, profile)
    if any(each.code == "GP205" for each in findings):
        now = replace(now, solver=SolverReport(method="given", status="given"))
    return with_findings(replace(verdict, plan=now), findings)


def _findings(written: Plan, now: Plan, profile: Profile) -> tuple[Finding, ...]:
    problems, unchecked = list(certificate_problems(written, now.solver)), ""
    if now.solver.status != "given":
        problem, unchecked = _solved_again(now, profile)
        problems += [problem] if problem else []
    wrong = [finding("GP205", "; ".join(problems), hint=_HINT)] if problems else []
    return (*wrong, *([finding("GP206", f"{unchecked}: status and bound are as stored")] if unchecked else []))


def _solved_again(now: Plan, profile: Profile) -> tuple[str, str]:
    # Return what contradicts the plan's claims, and why they could not be checked; empty texts for neither.
    if len(profile.layers) * now.inputs.devices > MOST_WORK:
        return "", "there are too many layers and devices to solve again"
    # A plan does not record if M was fixed, so the request is solved for the plan's own M.
    request = Request.of_plan(now, micro_batches=now.micro_batches, time_limit_s=_TIME_LIMIT_S)
    if now.solver.status != "optimal":
        # Only a proof of optimality needs a long search. To refute a lower bound, any faster plan is enough.
        request = replace(request.without_longer_search(), actions=_ACTIONS)
    try:
        best = solve(profile, request, breaks_ties=False)
        if _contradiction(now, best):
            # Of equally fast plans, name the one that `solve` returns.
            return _contradiction(now, solve(profile, request)), ""
    except SolverError:
        return "", "the solver took too long"
    except MissingPackageError as error:
        return "", error.message
    except PlannerError as error:
        return f"solving again found no such plan: {error.message}", ""
    return "", ""


def _contradiction(now: Plan, best: Plan) -> str:
    step_us, best_us, bound_us = now.predicted.step_us, best.predicted.step_us, now.solver.lower_bound_us
    if now.solver.status == "optimal" and best_us < step_us and not is_equal_rounded("step_us", best_us, step_us):
        return f"it is marked as optimal, but {list(best.balance)} takes {best_us / 1e3:.1f} ms"
    if best_us < bound_us and not is_equal_rounded("lower_bound_us", best_us, bound_us):
        return f"its lower bound is {bound_us / 1e3:.1f} ms, but {list(best.balance)} is faster"
    named_us = 0.0 if best.schedule == SEARCHED.name else now.solver.named_lower_bound_us
    if best_us < named_us and not is_equal_rounded("named_lower_bound_us", best_us, named_us):
        return (
            f"its lower bound for named schedules is {named_us / 1e3:.1f} ms, "
            f"but {list(best.balance)} under {best.schedule} is faster"
        )
    return ""
