"""Makespans of many partitions at once, compared with the simulator."""

import random

import numpy as np
import pytest

from planner.core.cost.simulate import StageTimes, makespans, simulate
from planner.core.schedule import SCHEDULES, Action
from planner.core.values.plan import ScheduleName

KINDS: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 4),
]


def random_times(rng: np.random.Generator, num_partitions: int, num_stages: int) -> dict[str, np.ndarray]:
    """Return times of which some are zero or equal, and links of which some are slower than stages."""
    shape = (num_partitions, num_stages)
    forward = rng.choice([0.0, 1.0, 2.5], size=shape) * rng.choice([1.0, rng.random()])
    backward = rng.uniform(0, 9, shape)
    last = backward * rng.choice([1.0, 0.5], size=shape)
    send = rng.uniform(0, 12, shape) * rng.choice([0.0, 0.05, 1.0], size=shape) * rng.choice([0.0, 1.0, 1.0])
    send[:, -1] = 0.0
    return {"forward_us": forward, "backward_us": backward, "last_backward_us": last, "send_us": send}


def simulated(
    actions: tuple[tuple[Action, ...], ...], times: dict[str, np.ndarray], blocking: np.ndarray, n: int
) -> float:
    """Return the simulated makespan of partition n."""
    stages = [
        StageTimes(**{name: float(of[n, s]) for name, of in times.items()}, blocking=bool(blocking[s]))
        for s in range(len(blocking))
    ]
    return max(event.end_us for event in simulate(actions, stages))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
def test_makespans_equal_the_simulator(schedule: ScheduleName, chunks: int) -> None:
    """Links are absent, free, blocking or mixed."""
    draw, rng = random.Random(f"{schedule} {chunks}"), np.random.default_rng(3)
    differ = 0
    for _ in range(60):
        num_devices = draw.randint(1, 6)
        micro_batches = num_devices * draw.randint(1, 4)
        if schedule == "gpipe":
            micro_batches = draw.randint(1, 9)
        elif schedule == "interleaved" and draw.random() < 0.2:
            micro_batches = draw.randint(1, num_devices)
        actions = SCHEDULES[schedule].actions(num_devices, micro_batches, chunks)
        num_stages = num_devices * chunks
        times = random_times(rng, 5, num_stages)
        blocking = rng.random(num_stages) < draw.choice([0.0, 0.5, 1.0])
        found = makespans(actions, times, blocking=blocking)
        expected = [simulated(actions, times, blocking, n) for n in range(5)]
        assert found.shape == (5,)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        differ += len(set(expected)) > 1
    assert differ > 50


@pytest.mark.parametrize("blocking", [False, True])
def test_scalar_blocking_applies_to_every_boundary(*, blocking: bool) -> None:
    actions = SCHEDULES["1f1b"].actions(4, 7)
    times = random_times(np.random.default_rng(1), 3, 4)
    times["send_us"][:, :-1] = 1.5
    expected = [simulated(actions, times, np.full(4, blocking), n) for n in range(3)]
    np.testing.assert_allclose(makespans(actions, times, blocking=blocking), expected, rtol=1e-12)


def test_makespans_of_several_blocks_of_partitions() -> None:
    """Inputs may be integers and are not modified."""
    actions = SCHEDULES["interleaved"].actions(2, 4, 2)
    rng = np.random.default_rng(5)
    times = {name: rng.integers(0, 9, (2500, 4)) for name in random_times(rng, 1, 4)}
    before = {name: of.copy() for name, of in times.items()}
    together = makespans(actions, times)
    assert all((times[name] == of).all() for name, of in before.items())
    for n in (0, 1, 1023, 1024, 2047, 2048, 2499):
        alone = makespans(actions, {name: of[n : n + 1] for name, of in times.items()})
        assert together[n] == alone[0] == simulated(actions, times, np.zeros(4, dtype=bool), n)


def test_zero_partitions_have_no_makespans() -> None:
    times = {name: np.zeros((0, 2)) for name in random_times(np.random.default_rng(0), 1, 2)}
    assert makespans(SCHEDULES["gpipe"].actions(2, 2), times).shape == (0,)


def test_makespans_refuse_deadlocks_and_wrong_shapes() -> None:
    times = random_times(np.random.default_rng(0), 2, 2)
    with pytest.raises(ValueError, match=r"deadlock.*B0.*F0"):
        makespans([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]], times)
    with pytest.raises(ValueError, match="2 stages cannot be divided evenly among 3 devices"):
        makespans(SCHEDULES["gpipe"].actions(3, 2), times)
    with pytest.raises(ValueError, match="one shape"):
        makespans(SCHEDULES["gpipe"].actions(2, 2), times | {"send_us": np.zeros((2, 1))})
