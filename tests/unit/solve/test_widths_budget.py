"""Budget of searches over several widths: spent on the fastest width, replicas and M."""

from pathlib import Path

import pytest

import planner
from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.values.plan import ProfileReference
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.answer import Answer
from planner.solve.chunks import search as chunks_search
from planner.solve.deadline import Deadline
from planner.solve.questions.trade_off import figures_by_schedule
from planner.solve.space.case import Case

CONFIGURATIONS = Path(__file__).parents[3] / "sample_models/configurations"


def profile_and_request(name: str, schedule: str, nodes: str) -> tuple[Profile, Request]:
    """Return a profile of a model for groups of 4 and 8 GPUs, and a request for a plan."""
    path = CONFIGURATIONS / name / "config.json"
    profile = planner.profile(path, device="estimate:h100", tensor_parallel="4,8")
    options = SolverOptions(nodes=nodes, schedule=schedule)
    return profile, request_of(profile, ProfileReference(path="", digest=""), options)


@pytest.mark.slow
def test_no_compared_schedule_is_faster_than_the_plan() -> None:
    """With 64 micro-batches, one simulation needs most of a schedule's budget for all M."""
    profile, request = profile_and_request("gemma-2-9b", "auto", "8x8")
    plan = solve(profile, request)
    points = figures_by_schedule(profile, plan, is_short_search=True)
    assert plan.predicted.step_us <= min(point.step_us for point in points if point.fits)
    assert all(point.fits for point in points)


@pytest.mark.nightly
def test_auto_is_not_slower_than_a_named_schedule() -> None:
    """The short searches of `auto` find 108.2 ms, a longer search for ZB-V 105.8 ms."""
    fastest, named = (solve(*profile_and_request("t5-11b", name, "4x8")).predicted for name in ("auto", "zbv"))
    assert fastest.step_us <= named.step_us


@pytest.mark.slow
def test_budget_of_a_named_schedule_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, cases with two GPUs per layer take most of the time, though none of their plans is fast."""
    limits = []
    real = chunks_search.search_chunked_partitions

    def recording(case: Case, *, upper_us: float, deadline: Deadline) -> Answer:
        limits.append(deadline.most_actions)
        return real(case, upper_us=upper_us, deadline=deadline)

    monkeypatch.setattr(chunks_search, "search_chunked_partitions", recording)
    assert solve(*profile_and_request("gemma-2-9b", "zbv", "4x8")).schedule == "zbv"
    assert limits
    assert None not in limits
