"""The predicted period of steps, compared with a simulation of several steps in a row."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.cost.simulate import StageTimes, period_us
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Schedule
from tests.support.split_backwards import split_backwards
from tests.support.steps_in_a_row import mean_period_us

TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0])


@st.composite
def stages(draw: st.DrawFn, count: int, *, blocking: bool) -> list[StageTimes]:
    """Draw stage times and links; all, some or no links block."""
    found = []
    for _ in range(count):
        forward, i, w, again = draw(TIMES) + 1.0, draw(TIMES), draw(TIMES), draw(TIMES)
        times = StageTimes(
            forward_us=forward,
            backward_us=i + w + again,
            last_backward_us=i + w,
            send_us=draw(TIMES),
            blocking=blocking or draw(st.booleans()),
            input_backward_us=i + again,
            last_input_backward_us=i,
            weight_backward_us=w,
        )
        found.append(times)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.name)
def test_simulated_period_is_at_most_the_predicted_one(schedule: Schedule, blocking: bool) -> None:  # noqa: FBT001
    """Schedules with whole backwards are also tried with split backwards."""

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def shown(data: st.DataObject) -> None:
        num_devices, micro_batches = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 8))
        chunks = schedule.exact_chunks or (data.draw(st.integers(2, 3)) if schedule.is_chunked else 1)
        try:
            actions = schedule.actions(num_devices, micro_batches, chunks)
        except UsageError:
            return
        if not schedule.splits_backward:
            actions = split_backwards(actions, data.draw(st.integers(0, 3)))
        times = data.draw(stages(num_devices * chunks, blocking=blocking))
        between_steps_us = [data.draw(TIMES) for _ in range(num_devices)]
        assert mean_period_us(actions, times, between_steps_us) <= period_us(actions, times, between_steps_us) * (
            1 + 1e-9
        )

    shown()
