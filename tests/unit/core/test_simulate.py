"""Simulator: exclusive devices and links, dependencies, and detection of deadlocks."""

import random
from itertools import pairwise

import pytest

from planner.core.cost.simulate import Event, StageTimes, simulate
from planner.core.schedule import SCHEDULES, Action
from planner.core.values.plan import ScheduleName

# With the chunks of a device.
KINDS: list[tuple[ScheduleName, int]] = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 3)]


def stage(forward: float, backward: float, *, last: float | None = None, send: float = 0.0, blocking: bool = False):
    """Return the times of one stage."""
    return StageTimes(
        forward_us=forward,
        backward_us=backward,
        last_backward_us=backward if last is None else last,
        send_us=send,
        blocking=blocking,
    )


def end_of(events: tuple[Event, ...]) -> float:
    """Return the end of the last event."""
    return max(event.end_us for event in events)


def random_stages(rng: random.Random, num_stages: int) -> list[StageTimes]:
    """Return unequal stages with free, blocking or no links."""
    links = rng.choice(["none", "free", "blocking"])
    stages = []
    for k in range(num_stages):
        forward, backward = rng.choice([0.0, rng.uniform(0, 9)]), rng.uniform(0, 19)
        send = rng.uniform(0, 12) if links != "none" and k < num_stages - 1 else 0.0
        last = rng.choice([backward, backward * rng.random()])
        stages.append(stage(forward, backward, last=last, send=send, blocking=links == "blocking"))
    return stages


def test_gpipe_with_two_stages_by_hand() -> None:
    """GPipe with a link of 1: every event at the time that a pencil gives.

    stage 0: F0 0-2, F1 2-4, B0 14-15 (gradient 0 arrives at 14), B1 18-19
    stage 1: F0 3-6, F1 6-9, B0 9-13, B1 13-17; link back 13-14, 17-18
    """
    actions = SCHEDULES["gpipe"].actions(2, 2)
    events = simulate(actions, [stage(2, 1, send=1), stage(3, 4)])
    found = {(e.kind, e.stage, e.micro_batch): (e.start_us, e.end_us) for e in events}
    assert found == {
        ("F", 0, 0): (0, 2),
        ("F", 0, 1): (2, 4),
        ("send F", 0, 0): (2, 3),
        ("send F", 0, 1): (4, 5),
        ("F", 1, 0): (3, 6),
        ("F", 1, 1): (6, 9),
        ("B", 1, 0): (9, 13),
        ("B", 1, 1): (13, 17),
        ("send B", 1, 0): (13, 14),
        ("send B", 1, 1): (17, 18),
        ("B", 0, 0): (14, 15),
        ("B", 0, 1): (18, 19),
    }


def test_blocking_link_occupies_the_receiver() -> None:
    """Receiving has no event of its own."""
    actions = SCHEDULES["gpipe"].actions(2, 2)
    events = simulate(actions, [stage(2, 1, send=1, blocking=True), stage(3, 4)])
    found = {(e.kind, e.stage, e.micro_batch): (e.start_us, e.end_us) for e in events}
    # Stage 1 receives 2-3 and 6-7, stage 0 receives gradients 14-15 and 18-19.
    assert found == {
        ("F", 0, 0): (0, 2),
        ("F", 0, 1): (2, 4),
        ("F", 1, 0): (3, 6),
        ("F", 1, 1): (7, 10),
        ("B", 1, 0): (10, 14),
        ("B", 1, 1): (14, 18),
        ("B", 0, 0): (15, 16),
        ("B", 0, 1): (19, 20),
    }


def test_last_micro_batch_has_its_own_backward_time() -> None:
    events = simulate(SCHEDULES["gpipe"].actions(1, 3), [stage(1, 5, last=2)])
    assert [(e.micro_batch, e.end_us - e.start_us) for e in events if e.kind == "B"] == [(0, 5), (1, 5), (2, 2)]


def track_of(event: Event, num_devices: int) -> tuple[int, int]:
    """Return the occupied device, twice, or the two devices of a transfer."""
    step = {"F": 0, "B": 0, "send F": 1, "send B": -1}[event.kind]
    return event.device, (event.device + step) % num_devices


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
def test_events_of_a_device_or_link_do_not_overlap(schedule: ScheduleName, chunks: int) -> None:
    rng = random.Random(7)
    links_seen = 0
    for _ in range(60):
        num_devices = rng.randint(1, 6)
        stages = random_stages(rng, num_devices * chunks)
        micro_batches = (
            num_devices * rng.randint(1, 3) if schedule == "interleaved" else num_devices + rng.randint(0, 8)
        )
        actions = SCHEDULES[schedule].actions(num_devices, micro_batches, chunks)
        tracks: dict[tuple[int, int], list[Event]] = {}
        for event in simulate(actions, stages):
            assert event.device == event.stage % num_devices
            tracks.setdefault(track_of(event, num_devices), []).append(event)
        assert len([sender for sender, receiver in tracks if sender == receiver]) == num_devices
        links_seen += len(tracks) - num_devices
        for events in tracks.values():
            assert all(e.end_us >= e.start_us for e in events)
            assert all(
                a.end_us <= b.start_us for a, b in pairwise(sorted(events, key=lambda e: (e.start_us, e.end_us)))
            )
    assert links_seen > 20


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
def test_events_start_after_their_dependencies(schedule: ScheduleName, chunks: int) -> None:
    rng = random.Random(11)
    checked = 0
    for _ in range(40):
        num_devices = rng.randint(2, 5)
        num_stages = num_devices * chunks
        stages = random_stages(rng, num_stages)
        micro_batches = 2 * num_devices if schedule == "interleaved" else num_devices + 3
        actions = SCHEDULES[schedule].actions(num_devices, micro_batches, chunks)
        events = {(e.kind, e.stage, e.micro_batch): e for e in simulate(actions, stages)}
        assert len([1 for kind, _, _ in events if kind in "FB"]) == sum(map(len, actions))
        for (kind, at, i), event in events.items():
            source = at - 1 if kind == "F" else at + 1
            if kind not in "FB" or not 0 <= source < num_stages:
                continue
            crossing = stages[min(at, source)].send_us
            assert event.start_us >= events[kind, source, i].end_us + crossing - 1e-9
            checked += 1
        for todo in actions:
            ends = [events[a.kind, a.stage, a.micro_batch] for a in todo]
            assert all(a.end_us <= b.start_us for a, b in pairwise(ends))
    assert checked > 500


def test_events_start_as_early_as_possible() -> None:
    stages = [stage(5, 1, send=2), stage(1, 8, send=0.5), stage(4, 4)]
    actions = SCHEDULES["1f1b"].actions(3, 6)
    events = {(e.kind, e.stage, e.micro_batch): e for e in simulate(actions, stages)}
    for at, todo in enumerate(actions):
        free = 0.0
        for action in todo:
            source = at - 1 if action.kind == "F" else at + 1
            arrival = 0.0
            if 0 <= source < 3:
                sent = events.get((f"send {action.kind}", source, action.micro_batch))
                arrival = sent.end_us
            event = events[action.kind, at, action.micro_batch]
            assert event.start_us == max(free, arrival)
            free = event.end_us


def test_interleaved_chunks_by_hand() -> None:
    """Two devices with two chunks each, one micro-batch, times that are all different: it goes round and back.

    forward: stage 0 on device 0, link 1, stage 1 on device 1, link back to the front 10, stage 2 on device 0, link 2,
    stage 3 on device 1; then back over the same boundaries.
    """
    actions = SCHEDULES["interleaved"].actions(2, 1, 2)
    events = simulate(actions, [stage(3, 30, send=1), stage(4, 40, send=10), stage(5, 50, send=2), stage(6, 60)])
    assert [(e.kind, e.stage, e.device, e.start_us, e.end_us) for e in events] == [
        ("F", 0, 0, 0, 3),
        ("send F", 0, 0, 3, 4),
        ("F", 1, 1, 4, 8),
        ("send F", 1, 1, 8, 18),
        ("F", 2, 0, 18, 23),
        ("send F", 2, 0, 23, 25),
        ("F", 3, 1, 25, 31),
        ("B", 3, 1, 31, 91),
        ("send B", 3, 1, 91, 93),
        ("B", 2, 0, 93, 143),
        ("send B", 2, 0, 143, 153),
        ("B", 1, 1, 153, 193),
        ("send B", 1, 1, 193, 194),
        ("B", 0, 0, 194, 224),
    ]


def test_chunks_share_a_link_per_direction() -> None:
    """Device 0 runs F0 at 0-1, F1 at 1-2 and F2 at 2-3 of chunk 0 and sends each for 100.

    Forwards of chunk 1 return at 101 or later and use the same link, after all of chunk 0.
    """
    stages = [stage(1, 1, send=send) for send in (100, 0, 0, 7, 0, 0)]
    events = simulate(SCHEDULES["interleaved"].actions(3, 3, 2), stages)
    sent = [(e.stage, e.micro_batch, e.start_us, e.end_us) for e in events if e.kind == "send F"]
    assert sent == [
        (0, 0, 1, 101),
        (0, 1, 101, 201),
        (0, 2, 201, 301),
        (3, 0, 301, 308),
        (3, 1, 308, 315),
        (3, 2, 315, 322),
    ]
    back = [(e.stage, e.micro_batch) for e in events if e.kind == "send B"]
    assert len(back) == 6


def test_two_devices_use_one_link_for_both_chunks() -> None:
    actions = SCHEDULES["interleaved"].actions(2, 4, 2)
    events = simulate(actions, [stage(2, 1, send=5), stage(1, 3, send=9), stage(2, 2, send=6), stage(1, 1)])
    sent_by = {device: [e for e in events if e.device == device and e.kind not in "FB"] for device in (0, 1)}
    assert {(e.kind, e.stage) for e in sent_by[0]} == {("send F", 0), ("send F", 2), ("send B", 2)}
    assert {(e.kind, e.stage) for e in sent_by[1]} == {("send F", 1), ("send B", 1), ("send B", 3)}
    for sent in sent_by.values():
        assert all(a.end_us <= b.start_us for a, b in pairwise(sent))


@pytest.mark.parametrize("blocking", [False, True])
def test_one_device_has_no_transfers(*, blocking: bool) -> None:
    actions = SCHEDULES["interleaved"].actions(1, 4, 3)
    events = simulate(actions, [stage(1, 2, send=100, blocking=blocking)] * 3)
    assert {e.kind for e in events} == {"F", "B"}
    assert end_of(events) == 3 * 4 * (1 + 2)


def test_stages_must_be_a_multiple_of_devices() -> None:
    with pytest.raises(ValueError, match="3 stages cannot be divided evenly among 2 devices"):
        simulate(SCHEDULES["gpipe"].actions(2, 2), [stage(1, 1)] * 3)


def test_events_are_sorted_by_start() -> None:
    events = simulate(SCHEDULES["1f1b"].actions(3, 5), [stage(1, 2, send=1), stage(3, 1, send=2), stage(2, 2)])
    starts = [event.start_us for event in events]
    assert starts == sorted(starts)
    assert len(events) == 3 * 5 * 2 + 2 * 5 * 2


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([["0B0", "0F0"], ["1F0", "1B0"]], "deadlock.*B0.*F0"),
        ([["0F0"], ["1F1"]], "deadlock.*F1"),
        ([["0F0", "0B1", "0F1", "0B0"]], "deadlock"),
    ],
    ids=["circular waiting", "missing action", "backward before its forward"],
)
def test_actions_that_wait_forever_are_a_deadlock(actions: list[list[str]], message: str) -> None:
    lists = [[Action(int(text[0]), text[1], int(text[2])) for text in device] for device in actions]
    with pytest.raises(ValueError, match=message):
        simulate(lists, [stage(1, 1)] * len(lists))
