"""What each schedule would give for the same question."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner import api, files
from planner.core.schedule import SCHEDULES, SEARCHED, SPLITTING
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.questions.trade_off import trade_off_of
from tests.support.profiles import inputs_of, profile_of

CAP = 2000


def tight() -> Profile:
    """Eight layers that keep 100 bytes of each micro-batch."""
    return profile_of([10.0] * 8, [20.0] * 8, saved_bytes=100)


def in_halves() -> Profile:
    """The same with measured halves."""
    layers = tight().layers
    halves = [
        replace(
            layer,
            backward_input_us=tuple(time / 2 for time in layer.backward_us),
            backward_weight_us=tuple(time / 2 for time in layer.backward_us),
            weight_held_bytes=(10,) * len(layer.backward_us),
        )
        for layer in layers
    ]
    return replace(tight(), layers=tuple(halves))


def answer(profile: Profile, **changes: object):
    inputs = replace(inputs_of(4, 16, memory_bytes=CAP), schedule="auto", chunks=0, **changes)
    return solve(profile, Request(inputs=inputs, micro_batches=16, actions=20_000))


def test_every_schedule_has_a_point_where_halves_were_measured() -> None:
    """In their usual order; that of the answer is the answer, and what fits keeps the cap."""
    plan = answer(in_halves())
    points = trade_off_of(in_halves(), plan, micro_batches=16)
    names = [point.schedule for point in points]
    assert names == [name for name in (*SCHEDULES, SEARCHED.name) if name in names]
    assert set(names) >= set(SCHEDULES)
    (chosen,) = [point for point in points if point.schedule == plan.schedule]
    assert (chosen.step_us, chosen.bubble) == (plan.predicted.step_us, plan.predicted.bubble)
    assert chosen.peak_bytes == max(plan.device_bytes())
    assert all(0 < point.peak_bytes <= CAP for point in points if point.fits)
    assert sum(point.fits for point in points) >= 5


def test_nothing_is_said_of_halves_that_nobody_measured() -> None:
    """They are not tried, so they have no point."""
    points = trade_off_of(tight(), answer(tight()))
    tried = {point.schedule for point in points}
    assert {"gpipe", "1f1b", "interleaved"} <= tried
    assert not tried & {schedule.name for schedule in SPLITTING}


def test_a_point_is_what_the_schedule_alone_gives() -> None:
    """GPipe's best plan is proven either way."""
    points = trade_off_of(tight(), answer(tight()), micro_batches=16)
    inputs = replace(inputs_of(4, 16, memory_bytes=CAP), schedule="gpipe")
    alone = solve(tight(), Request(inputs=inputs, micro_batches=16))
    assert points[0].step_us == pytest.approx(alone.predicted.step_us)


def test_what_asks_for_one_schedule_compares_nothing() -> None:
    """Nor do cuts that are given, or a pipeline of one device."""
    plan = answer(tight())
    assert trade_off_of(tight(), replace(plan, inputs=replace(plan.inputs, schedule="gpipe"))) == ()
    assert trade_off_of(tight(), replace(plan, solver=replace(plan.solver, status="given"))) == ()


def test_the_file_holds_it_only_where_it_was_asked_for(tmp_path: Path) -> None:
    """As the trade-off over M; it is read back as it was written."""
    place = tmp_path / "plan.yaml"
    asked = {"devices": 2, "mem": CAP, "batch": 4, "micro_batches": 4, "output": place}
    assert api.solve(in_halves(), **asked).schedules == ()
    assert "schedules:" not in place.read_text()
    plan = api.solve(in_halves(), frontier=True, **asked)
    assert len(plan.schedules) >= len(SCHEDULES)
    assert [p.schedule for p in files.read_plan(str(place)).schedules] == [p.schedule for p in plan.schedules]
