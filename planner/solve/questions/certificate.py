"""Check of a plan's claims by solving its request again within seconds.

The claims are its status (optimal or not), its lower bound, and its frontier: the best plan's step time and memory for
each number of replicas and micro-batches.
"""

from dataclasses import replace

from planner.core.errors import MissingPackageError, PlannerError, SolverError
from planner.core.judge.verdict import Verdict, certificate_problems, checkable_report, is_equal_rounded, with_findings
from planner.core.schedule import SEARCHED
from planner.core.values.findings import Finding, finding
from planner.core.values.plan import FrontierPoint, Plan, SolverReport
from planner.core.values.profile import Profile
from planner.solve.request import Request
from planner.solve.search import MOST_WORK, solve

_TIME_LIMIT_S = 5.0
"""Time limit in seconds of each search that verifies the status, the lower bound or the frontier of a plan."""

_ACTIONS = 30_000
"""Number of actions simulated per schedule, if the plan does not claim to be optimal: some tenths of a second."""

_HINT = "solve again to recompute these values"


def check_certificate(written: Plan, verdict: Verdict, profile: Profile) -> Verdict:
    """Return the verdict with findings about the plan's status, lower bound and frontier.

    If one of the three is wrong, the plan in the returned verdict has the status `given` and no lower bound.

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
    # A plan does not record if M was fixed, so the request is solved for the plan's own M.
    problems = list(certificate_problems(written, now.solver))
    open_ones = []
    if now.solver.status != "given" or written.frontier:
        if len(profile.layers) * now.inputs.devices > MOST_WORK:
            open_ones.append("there are too many layers and devices to solve again")
        else:
            for question in (_faster, _frontier):
                problem, is_open = question(written, now, profile)
                (open_ones if is_open else problems).extend([problem] if problem else [])
    wrong = [finding("GP205", "; ".join(problems), hint=_HINT)] if problems else []
    unverified = "status, bound and frontier were read from the plan, and not verified"
    return (*wrong, *(finding("GP206", f"{why}: {unverified}") for why in open_ones[:1]))


def _faster(_written: Plan, now: Plan, profile: Profile) -> tuple[str, bool]:
    if now.solver.status == "given":
        return "", False
    request = Request.of_plan(now, micro_batches=now.micro_batches, time_limit_s=_TIME_LIMIT_S)
    if now.solver.status != "optimal":
        # Only a proof of optimality needs a long search. To refute a lower bound, any faster plan is enough.
        request = replace(request.without_longer_search(), actions=_ACTIONS)
    try:
        best = solve(profile, request, breaks_ties=False)
        if _contradiction(now, best):
            # Of equally fast plans, name the one that `solve` returns.
            return _contradiction(now, solve(profile, request)), False
    except (SolverError, MissingPackageError) as error:
        return "the solver took too long" if isinstance(error, SolverError) else error.message, True
    except PlannerError as error:
        return f"solving again found no such plan: {error.message}", False
    if now.solver.status == "optimal" and best.solver.status != "optimal":
        return "solving again does not prove that it is optimal", True
    return "", False


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


def _frontier(written: Plan, now: Plan, profile: Profile) -> tuple[str, bool]:
    if not written.frontier:
        return "", False
    from planner.solve.methods import lacks_highs  # noqa: PLC0415 - few plans have a frontier
    from planner.solve.questions.insight import frontier_of  # noqa: PLC0415 - few plans have a frontier

    fixed = now.micro_batches if len(written.frontier) == 1 else None
    request = Request.of_plan(now, micro_batches=fixed, time_limit_s=_TIME_LIMIT_S)
    if lacks_highs(request.schedules):
        return "highspy is not installed, without which other plans may be found", True
    try:
        points = {(p.replicas, p.micro_batches): p for p in frontier_of(profile, request, now)}
    except MissingPackageError as error:
        return error.message, True
    except PlannerError as error:
        return f"the plan has a frontier, but solving again finds none: {error.message}", False
    wrong = [p.micro_batches for p in written.frontier if not _alike(p, points.get((p.replicas, p.micro_batches)))]
    return (f"its frontier differs at M = {', '.join(map(str, wrong[:5]))}" if wrong else ""), False


def _alike(written: FrontierPoint, computed: FrontierPoint | None) -> bool:
    if computed is None:
        return False
    figures = ("step_us", "samples_per_s", "bubble", "peak_bytes", "recompute_share")
    rest = replace(written, **{name: getattr(computed, name) for name in figures})
    return rest == computed and all(
        is_equal_rounded(name, getattr(written, name), getattr(computed, name)) for name in figures
    )
