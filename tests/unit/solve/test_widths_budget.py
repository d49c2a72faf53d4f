"""Budget of searches over several widths: spent on the fastest width, replicas and M."""

from pathlib import Path

from planner import api
from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.values.plan import ProfileReference
from planner.solve import solve
from planner.solve.questions.trade_off import trade_off_of

CONFIGURATION = Path(__file__).parents[3] / "sample_models/configurations/gemma-2-9b/config.json"


def test_no_compared_schedule_is_faster_than_the_plan() -> None:
    """With 64 micro-batches, one simulation needs most of a schedule's budget for all M."""
    profile = api.profile(CONFIGURATION, device="estimate:h100", tensor_parallel="4,8")
    request = request_of(profile, ProfileReference(path="", digest=""), SolverOptions(nodes="8x8"))
    plan = solve(profile, request)
    points = trade_off_of(profile, plan, is_short=True)
    assert plan.predicted.step_us <= min(point.step_us for point in points if point.fits)
    assert all(point.fits for point in points)
