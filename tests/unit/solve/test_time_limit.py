"""Time limits: a true gap or a clear error, and answers that depend only on the request."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planner
from planner.core.errors import InfeasibleError, SolverError
from planner.core.judge.verdict import judge
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, Plan, ScheduleName
from planner.core.values.profile import Profile
from planner.files import dump
from planner.solve import Request, deadline, methods, solve
from planner.solve.deadline import SearchObserver
from planner.solve.questions import insight
from tests.support.chains import random_profile
from tests.support.house import modules
from tests.support.profiles import inputs_of

LIMITS_S = (0.0, 1e-6, 0.002, 0.005, 0.02, 0.05, 0.1, 0.5)
"""Time limits for a clock that is 1 ms later at each reading."""

MOST_READINGS = 100
"""Readings of the clock from the time limit to the answer: a few for each case of `auto`."""

QUESTIONS = {
    "gpipe": inputs_of(6, 12),
    "gpipe-unlike": replace(inputs_of(5, 12), speeds=(1.0, 2.0, 1.0, 0.5, 1.0)),
    "layers": replace(inputs_of(4, 12, memory_bytes=12_000), recompute="layers"),
    "1f1b": replace(inputs_of(6, 12), schedule="1f1b"),
    "interleaved": replace(inputs_of(4, 12), schedule="interleaved", chunks=0),
    "auto": replace(inputs_of(4, 12), schedule="auto", chunks=0, replicas=0),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "count[int]":
    """Replace the solver's clock by one that is 1 ms later at each reading."""
    readings = count()
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: next(readings) / 1e3))
    return readings


def limited(profile: Profile, inputs: Inputs, limit_s: float, clock: "count[int]") -> Plan | None:
    """Return the plan; None if the error says that there was too little time."""
    begin = next(clock)
    plan, said = None, f"time limit of {limit_s:g} s --time-limit"
    try:
        plan = solve(profile, Request(inputs=inputs, time_limit_s=limit_s))
    except SolverError as error:
        said = f"{error.message} {error.hint}"
    assert f"time limit of {limit_s:g} s" in said
    assert "--time-limit" in said
    assert next(clock) - begin < limit_s * 1e3 + MOST_READINGS
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "question", [pytest.param(q, marks=pytest.mark.nightly) if q == "interleaved" else q for q in QUESTIONS]
)
def test_gap_at_the_time_limit_is_true(question: str, clock: "count[int]") -> None:
    inputs = QUESTIONS[question]
    profile = random_profile(4, 24)
    best = solve(profile, Request(inputs=inputs))
    for limit_s in LIMITS_S:
        plan = limited(profile, inputs, limit_s, clock)
        if plan is None:
            continue
        found, solver = plan.predicted.step_us, plan.solver
        assert judge(plan, profile, profile_digest=inputs.profile.digest, strict=True).fits
        assert solver.status in ("optimal", "feasible")
        assert solver.lower_bound_us <= best.predicted.step_us * (1 + 1e-9)
        assert best.solver.lower_bound_us <= found * (1 + 1e-9)
        assert solver.gap == pytest.approx(1 - solver.lower_bound_us / found, abs=1e-9)
        if solver.status == "optimal":
            assert found == pytest.approx(min(found, best.predicted.step_us), rel=1e-9)


def test_time_limit_of_zero_is_reported_as_too_little_time(clock: "count[int]") -> None:
    for inputs in QUESTIONS.values():
        assert limited(random_profile(4, 24), inputs, 0.0, clock) is None


@pytest.mark.parametrize("question", ["gpipe", "layers", "1f1b", "interleaved", "auto"])
def test_too_little_time_is_not_reported_as_infeasible(question: str) -> None:
    inputs = replace(QUESTIONS[question], memory_bytes=(300,) * QUESTIONS[question].devices)
    profile = random_profile(4, 24)
    with pytest.raises(SolverError, match="time limit"):
        solve(profile, Request(inputs=inputs, time_limit_s=0.0))
    # Of all interleaved plans some are tried only.
    with pytest.raises(
        InfeasibleError if question not in ("interleaved", "auto") else (InfeasibleError, SolverError)
    ) as raised:
        solve(profile, Request(inputs=inputs))
    assert "time limit" not in str(raised.value)


def test_plan_with_enough_time_equals_the_plan_without_limit() -> None:
    profile = random_profile(4, 24)
    for question in ("gpipe", "1f1b"):
        inputs = QUESTIONS[question]
        unlimited = solve(profile, Request(inputs=inputs))
        assert solve(profile, Request(inputs=inputs, time_limit_s=600.0)) == unlimited


@pytest.mark.slow
def test_only_the_deadline_module_reads_the_clock() -> None:
    in_room = [module for module in modules() if module.room == "solve"]
    clocks = re.compile(r"^\s*(import|from) (time|datetime)\b", flags=re.MULTILINE)
    assert [module.path for module in in_room if clocks.search(module.text)] == ["planner/solve/deadline.py"]


# ---- the same question, the same plan


def plans() -> str:
    """Return plans for all kinds of requests, some with many equally good plans, as text."""
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "auto")
    texts = []
    for seed, schedule in enumerate(schedules):
        profile = random_profile(seed, 7, exact=seed % 2 == 1, sizes=(1, 4))
        alike = replace(profile, layers=tuple(replace(profile.layers[2], name=one.name) for one in profile.layers))
        inputs = replace(
            inputs_of(4, 4, link=Link(latency_us=1.0, bytes_per_s=1e8)),
            schedule=schedule,
            chunks=0 if schedule in ("interleaved", "auto") else 1,
            replicas=0,
            together=(("layers.1", "layers.2"),),
        )
        texts += [dump(solve(one, Request(inputs=inputs))) for one in (profile, alike)]
    unlike = replace(inputs_of(3, 4), speeds=(1.0, 2.0, 2.0))
    for inputs in (unlike, replace(unlike, recompute="layers")):
        texts.append(dump(solve(random_profile(9, 6), Request(inputs=inputs))))
    return "\n".join(texts)


@pytest.mark.slow
def test_every_kind_of_request_gives_the_same_bytes() -> None:
    """The second process hashes strings in another order."""
    first = plans()
    assert first == plans()
    assert first.count("schema: gpipe-plan/plan/v1") == 10
    root = Path(__file__).parents[3]
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('limits', {str(Path(__file__))!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "sys.stdout.write(module.plans())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "4242", "PYTHONIOENCODING": "utf-8"}
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert other.stdout == first


def test_stopped_search_returns_the_best_plan_so_far() -> None:
    profile = random_profile(3, 12)
    found: list[float] = []

    def note(step_us: float, schedule: ScheduleName, least_us: float) -> None:
        assert schedule in {*SCHEDULES, SEARCHED.name}
        assert 0 < least_us <= step_us
        found.append(step_us)

    watch = SearchObserver(is_stopped=lambda: len(found) >= 3, on_plan=note)
    plan = solve(profile, Request(inputs=QUESTIONS["auto"], watch=watch))
    assert len(found) < 20
    assert plan.solver.status == "feasible"
    assert plan.predicted.step_us == pytest.approx(min(found))
    with pytest.raises(SolverError, match="stopped before a plan was found"):
        solve(profile, Request(inputs=QUESTIONS["auto"], watch=SearchObserver(is_stopped=lambda: True)))


def test_stopped_search_begins_no_further_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of other cases work for seconds before their own first check, if there are many devices."""
    found: list[float] = []
    begun: list[bool] = []
    search_function_for = methods.search_function_for

    def noted(*args: Any) -> Any:
        search = search_function_for(*args)

        def run(*given: Any, **named: Any) -> Any:
            begun.append(bool(found))
            return search(*given, **named)

        return run

    monkeypatch.setattr(methods, "search_function_for", noted)
    watch = SearchObserver(is_stopped=lambda: bool(found), on_plan=lambda step_us, *_: found.append(step_us))
    solve(random_profile(3, 12), Request(inputs=QUESTIONS["auto"], watch=watch))
    assert found
    assert not any(begun)


def with_spread(profile: Profile) -> Profile:
    """Return the profile with repeats that differ, so that `explain` reports the effect of noise."""
    return replace(profile, layers=tuple(replace(each, spread=(0.1,)) for each in profile.layers))


@pytest.mark.parametrize(("option", "name"), [("frontier", "frontier_of"), ("explain", "insight_of")])
def test_stop_after_the_plan_ends_later_searches(option: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan does not change, and points that were not searched are not reported as infeasible."""
    profile, stopped = with_spread(random_profile(3, 12)), list[bool]()
    request: dict[str, Any] = {"devices": 4, "mem": "1TB", "batch": 12, "schedule": "auto"}
    search, tried = getattr(insight, name), list[bool]()

    def stop_before(*arguments: Any) -> Any:
        stopped.append(True)
        return search(*arguments)

    def counted(*arguments: Any, **more: Any) -> Any:
        plan = whole(*arguments, **more)
        tried.append(True)
        return plan

    whole = insight.solve
    monkeypatch.setattr(insight, name, stop_before)
    monkeypatch.setattr(insight, "solve", counted)
    watch = SearchObserver(is_stopped=lambda: bool(stopped))
    plan = planner.solve(profile, watch=watch, **request, **{option: True})
    assert stopped
    assert not tried
    assert plan == planner.solve(profile, **request)
