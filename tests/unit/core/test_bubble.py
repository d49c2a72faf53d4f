"""Bubbles of equal stages without links, as exact fractions: (K-1)/(MV+K-1).

Every device computes M V (F+B), so this holds exactly if the makespan is (MV+K-1) (F+B).
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.cost.simulate import StageTimes, makespans, simulate
from planner.core.cost.step_time import gpipe_step_us
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import ScheduleName

MOST_STAGES = 16
MOST_MICRO_BATCHES = 64
# F and B of one partition each: equal, unequal either way, and one that takes no time.
TIMES = [(1, 1), (1, 2), (5, 3), (0, 4), (7, 0)]


def ideal_bubble(num_stages: int, micro_batches: int) -> Fraction:
    """Return the bubble of GPipe's paper."""
    return Fraction(num_stages - 1, micro_batches + num_stages - 1)


def equal_stages(forward_us: int, backward_us: int, num_stages: int) -> list[StageTimes]:
    """Return equal stages without links."""
    times = StageTimes(forward_us=forward_us, backward_us=backward_us, last_backward_us=backward_us)
    return [times] * num_stages


def ends_of(schedule: ScheduleName, num_devices: int, micro_batches: int, chunks: int = 1) -> list[int]:
    """Return the makespans with `TIMES`."""
    actions = SCHEDULES[schedule].actions(num_devices, micro_batches, chunks)
    forward, backward = (np.repeat(np.array(TIMES, dtype=float)[:, [n]], num_devices * chunks, axis=1) for n in (0, 1))
    times = {"forward_us": forward, "backward_us": backward, "last_backward_us": backward}
    ends = makespans(actions, {**times, "send_us": np.zeros_like(forward)})
    assert (ends == ends.astype(int)).all()
    return [int(end) for end in ends]


@pytest.mark.parametrize("num_stages", range(1, MOST_STAGES + 1))
def test_closed_form_of_gpipe_has_the_bubble_of_its_paper(num_stages: int) -> None:
    for micro_batches in range(1, MOST_MICRO_BATCHES + 1):
        for forward_us, backward_us in TIMES:
            end = gpipe_step_us(equal_stages(forward_us, backward_us, num_stages), micro_batches)
            bubble = 1 - Fraction(micro_batches * (forward_us + backward_us)) / Fraction(end)
            assert bubble == ideal_bubble(num_stages, micro_batches)


@settings(deadline=None)
@given(st.integers(1, MOST_STAGES), st.integers(1, MOST_MICRO_BATCHES), st.integers(0, 10**6), st.integers(1, 10**6))
def test_simulated_gpipe_has_the_bubble_of_its_paper(num_stages, micro_batches, forward_us, backward_us):
    actions = SCHEDULES["gpipe"].actions(num_stages, micro_batches)
    events = simulate(actions, equal_stages(forward_us, backward_us, num_stages))
    end = max(event.end_us for event in events)
    idle = num_stages * Fraction(end) - sum(Fraction(event.end_us) - Fraction(event.start_us) for event in events)
    assert idle / (num_stages * Fraction(end)) == ideal_bubble(num_stages, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2, 3, 7, MOST_STAGES])
def test_1f1b_has_the_bubble_of_gpipe(num_stages: int) -> None:
    for micro_batches in range(num_stages, MOST_MICRO_BATCHES + 1):
        for (forward_us, backward_us), end in zip(TIMES, ends_of("1f1b", num_stages, micro_batches), strict=True):
            bubble = 1 - Fraction(micro_batches * (forward_us + backward_us), end)
            assert bubble == ideal_bubble(num_stages, micro_batches)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_chunks_divide_the_bubble(num_devices: int, chunks: int) -> None:
    """If M is below K, M and K swap: a round is too short to keep all devices busy."""
    tried = 0
    for micro_batches in range(1, 33):
        try:
            ends = ends_of("interleaved", num_devices, micro_batches, chunks)
        except UsageError:
            continue
        most, least = max(num_devices, micro_batches), min(num_devices, micro_batches)
        assert ends == [(chunks * most + least - 1) * (f + b) for f, b in TIMES]
        tried += 1
    assert tried >= 15
