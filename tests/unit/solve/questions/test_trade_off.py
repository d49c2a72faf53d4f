"""Trade-off between schedules for the same request."""

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.schedule import SCHEDULES, SEARCHED, SPLITTING
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.questions.trade_off import figures_by_schedule
from tests.support.profiles import inputs_of, profile_of

CAP = 2000


def tight() -> Profile:
    """Return eight layers that save 100 bytes per micro-batch."""
    return profile_of([10.0] * 8, [20.0] * 8, saved_bytes=100)


def with_split_backward() -> Profile:
    """Return the same layers with measured split backwards."""
    layers = tight().layers
    layers = [
        replace(
            layer,
            backward_input_us=tuple(time / 2 for time in layer.backward_us),
            backward_weight_us=tuple(time / 2 for time in layer.backward_us),
            weight_held_bytes=(10,) * len(layer.backward_us),
        )
        for layer in layers
    ]
    return replace(tight(), layers=tuple(layers))


def answer(profile: Profile, **changes: object):
    inputs = replace(inputs_of(4, 16, memory_bytes=CAP), schedule="auto", chunks=0, **changes)
    return solve(profile, Request(inputs=inputs, micro_batches=16, actions=20_000))


def test_every_schedule_has_a_point_if_split_backwards_were_measured() -> None:
    plan = answer(with_split_backward())
    points = figures_by_schedule(with_split_backward(), plan, micro_batches=16)
    names = [point.schedule for point in points]
    assert names == [name for name in (*SCHEDULES, SEARCHED.name) if name in names]
    assert set(names) >= set(SCHEDULES)
    (chosen,) = [point for point in points if point.schedule == plan.schedule]
    assert (chosen.step_us, chosen.bubble) == (plan.predicted.step_us, plan.predicted.bubble)
    assert chosen.peak_bytes == max(plan.peak_bytes_by_device())
    assert all(0 < point.peak_bytes <= CAP for point in points if point.fits)
    assert sum(point.fits for point in points) >= 5
    assert not any(point.short_search for point in points)


def test_points_equal_the_answers_to_requests_for_their_schedules() -> None:
    profile = with_split_backward()
    for point in figures_by_schedule(profile, answer(profile), micro_batches=16):
        if point.schedule in ("gpipe", "1f1b", "interleaved", "zbv"):
            chunks = 0 if point.schedule in ("interleaved", "zbv") else 1
            inputs = replace(inputs_of(4, 16, memory_bytes=CAP), schedule=point.schedule, chunks=chunks)
            alone = solve(profile, Request(inputs=inputs, micro_batches=16, actions=None))
            assert point.step_us <= alone.predicted.step_us * 1.01


def test_points_of_short_searches_are_marked_unless_proven() -> None:
    plan = answer(with_split_backward())
    points = figures_by_schedule(with_split_backward(), plan, micro_batches=16, is_short_search=True)
    proven = {point.schedule for point in points if not point.short_search}
    assert proven == {"gpipe", "1f1b", plan.schedule}


def test_zero_bubble_schedules_have_no_point_without_split_backwards() -> None:
    points = figures_by_schedule(tight(), answer(tight()))
    tried = {point.schedule for point in points}
    assert {"gpipe", "1f1b", "interleaved"} <= tried
    assert not tried & {schedule.name for schedule in SPLITTING}


def test_point_equals_the_plan_of_its_schedule() -> None:
    points = figures_by_schedule(tight(), answer(tight()), micro_batches=16)
    inputs = replace(inputs_of(4, 16, memory_bytes=CAP), schedule="gpipe")
    alone = solve(tight(), Request(inputs=inputs, micro_batches=16))
    assert points[0].step_us == pytest.approx(alone.predicted.step_us)


def test_named_schedules_and_given_cuts_have_no_trade_off() -> None:
    plan = answer(tight())
    assert figures_by_schedule(tight(), replace(plan, inputs=replace(plan.inputs, schedule="gpipe"))) == ()
    assert figures_by_schedule(tight(), replace(plan, solver=replace(plan.solver, status="given"))) == ()


def test_plan_file_has_the_trade_off_only_if_requested(tmp_path: Path) -> None:
    place = tmp_path / "plan.yaml"
    asked = {"devices": 2, "mem": CAP, "batch": 4, "micro_batches": 4, "output": place}
    assert planner.solve(with_split_backward(), **asked).schedules == ()
    assert "schedules:" not in place.read_text()
    plan = planner.solve(with_split_backward(), frontier=True, **asked)
    assert len(plan.schedules) >= len(SCHEDULES)
    assert [p.schedule for p in files.read_plan(str(place)).schedules] == [p.schedule for p in plan.schedules]
