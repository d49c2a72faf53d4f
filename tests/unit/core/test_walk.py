"""The path that a reader takes through the code when following the check of one plan.

The path lists the functions of planner/core/judge and planner/core/cost in the order in which they are first entered.
Comprehensions and lambdas belong to their function. Neighbors in one file are one visit; a visit to a file that an
earlier visit was in is a return.
"""

import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import FrameType

import pytest

from planner.core.judge.verdict import judge
from planner.core.values.plan import ScheduleName
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of


def calls_of_a_check(schedule: ScheduleName) -> list[tuple[str, str]]:
    """Return file and name of every function that the check of a plan from exact records enters."""
    profile = random_profile(3, 6, exact=True)
    plan = solve(profile, Request(inputs=replace(inputs_of(2, 4), schedule=schedule), micro_batches=4))
    calls = []

    def note(frame: FrameType, event: str, _value: object) -> None:
        code = frame.f_code
        if event == "call" and "/core/" in code.co_filename and not code.co_name.startswith("<"):
            calls.append((code.co_filename.rpartition("/core/")[2], code.co_qualname))

    sys.setprofile(note)
    try:
        judge(plan, profile, profile_digest=plan.inputs.profile.digest)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_check_of_a_plan_returns_to_few_files(schedule: ScheduleName) -> None:
    files = [file for file, _ in dict.fromkeys(calls_of_a_check(schedule)) if file.startswith(("judge/", "cost/"))]
    visits = [file for file, _ in groupby(files)]
    assert len(visits) - len(set(visits)) <= 25


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_check_evaluates_the_plan_once(schedule: ScheduleName) -> None:
    calls = Counter(name for file, name in calls_of_a_check(schedule) if file == "cost/evaluate.py")
    assert calls["Evaluation._times_of"] == 2
    for figure in ("step_us", "between_steps_us", "memory", "predicted", "stages"):
        assert calls[f"Evaluation.{figure}"] == 1
