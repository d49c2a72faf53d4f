"""Action orders of schedules: completeness, order, and micro-batches in flight."""

import pytest

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES, Action, execution_order
from planner.core.schedule import Schedule as Base
from planner.core.values.plan import ScheduleName

NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
SIZES = [(1, 1), (1, 5), (2, 2), (2, 3), (3, 7), (4, 4), (4, 9), (8, 8), (8, 32)]


def as_text(actions: tuple[Action, ...]) -> str:
    """Return a text such as `0F0 0F1 0B0 0B1`."""
    return " ".join(map(str, actions))


def most_waiting(actions: tuple[Action, ...]) -> int:
    """Return the most micro-batches between forward and backward in the action order."""
    waiting: set[int] = set()
    most = 0
    for action in actions:
        if action.kind == "F":
            waiting.add(action.micro_batch)
        else:
            waiting.remove(action.micro_batch)
        most = max(most, len(waiting))
    assert not waiting
    return most


@pytest.mark.parametrize(
    ("schedule", "sizes", "order"),
    [
        ("gpipe", (2, 3), ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("gpipe", (8, 1), [f"{k}F0 {k}B0" for k in range(8)]),
        (
            "1f1b",
            (3, 4),
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        (
            "interleaved",
            (2, 4, 2),
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
    ],
)
def test_action_orders_by_hand(schedule: ScheduleName, sizes: tuple[int, ...], order: list[str]) -> None:
    assert [as_text(stage) for stage in SCHEDULES[schedule].actions(*sizes)] == order


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_1f1b_has_as_many_micro_batches_in_flight_as_later_stages(num_stages: int, micro_batches: int) -> None:
    stages = SCHEDULES["1f1b"].actions(num_stages, micro_batches)
    counted = [most_waiting(stage) for stage in stages]
    assert counted == [min(micro_batches, num_stages - k) for k in range(num_stages)]
    assert counted == [SCHEDULES["1f1b"].in_flight(k, num_stages, micro_batches) for k in range(num_stages)]


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_gpipe_has_every_micro_batch_in_flight(num_stages: int, micro_batches: int) -> None:
    stages = SCHEDULES["gpipe"].actions(num_stages, micro_batches)
    assert {most_waiting(stage) for stage in stages} == {micro_batches}
    assert {SCHEDULES["gpipe"].in_flight(k, num_stages, micro_batches) for k in range(num_stages)} == {micro_batches}


def test_1f1b_is_refused_with_fewer_micro_batches_than_stages() -> None:
    with pytest.raises(UsageError, match=r"M = 3, K = 4") as refused:
        SCHEDULES["1f1b"].actions(4, 3)
    assert "--schedule gpipe" in refused.value.hint


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_in_flight_formulas_equal_the_action_order(schedule: ScheduleName, num_stages: int, micro_batches: int) -> None:
    kind = SCHEDULES[schedule]
    for device in range(num_stages):
        walked = Base.in_flight(kind, device, num_stages, micro_batches)
        assert kind.in_flight(device, num_stages, micro_batches) == walked


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 3)])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_execution_order_respects_action_orders_and_dependencies(schedule, chunks, num_devices):
    lists = SCHEDULES[schedule].actions(num_devices, 2 * num_devices, chunks)
    num_stages = num_devices * chunks
    order = execution_order(lists)
    for device, row in enumerate(lists):
        assert [action for action in order if action.stage % num_devices == device] == list(row)
    place = {(action.kind, action.stage, action.micro_batch): n for n, action in enumerate(order)}
    assert len(place) == len(order) == sum(map(len, lists))
    for (kind, stage, i), n in place.items():
        needed = ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i)
        if kind == "B" and stage == num_stages - 1:
            needed = ("F", stage, i)
        assert needed[1] < 0 or place[needed] < n
