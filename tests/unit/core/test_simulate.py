"""The simulator: one thing at a time, nothing before what it needs, and no waiting in circles."""

import random
from itertools import pairwise

import pytest

from planner.core.plan import Schedule
from planner.core.schedule import Action, actions_of
from planner.core.simulate import Event, StageTimes, simulate

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")


def stage(forward: float, backward: float, *, last: float | None = None, send: float = 0.0, blocking: bool = False):
    """One stage's times."""
    return StageTimes(
        forward_us=forward,
        backward_us=backward,
        last_backward_us=backward if last is None else last,
        send_us=send,
        blocking=blocking,
    )


def end_of(events: tuple[Event, ...]) -> float:
    """When all is done."""
    return max(event.end_us for event in events)


def random_stages(rng: random.Random, num_stages: int) -> list[StageTimes]:
    """Unequal stages, with links or blocking links or none, the last without one."""
    links = rng.choice(["none", "free", "blocking"])
    stages = []
    for k in range(num_stages):
        forward, backward = rng.choice([0.0, rng.uniform(0, 9)]), rng.uniform(0, 19)
        send = rng.uniform(0, 12) if links != "none" and k < num_stages - 1 else 0.0
        last = rng.choice([backward, backward * rng.random()])
        stages.append(stage(forward, backward, last=last, send=send, blocking=links == "blocking"))
    return stages


def test_two_stages_and_two_micro_batches_by_hand() -> None:
    """GPipe with a link of 1: every event at the time that a pencil gives.

    stage 0: F0 0-2, F1 2-4, B0 14-15 (gradient 0 arrives at 14), B1 18-19
    stage 1: F0 3-6, F1 6-9, B0 9-13, B1 13-17; link back 13-14, 17-18
    """
    actions = actions_of("gpipe", num_stages=2, micro_batches=2)
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


def test_a_blocking_link_keeps_the_receiver_busy() -> None:
    """The same two stages: receiving is spent on the receiving stage, there is no event on the link."""
    actions = actions_of("gpipe", num_stages=2, micro_batches=2)
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


def test_the_last_micro_batch_has_its_own_backward_time() -> None:
    """`except-last` spares micro-batch M-1 its recomputation, no other."""
    events = simulate(actions_of("gpipe", num_stages=1, micro_batches=3), [stage(1, 5, last=2)])
    assert [(e.micro_batch, e.end_us - e.start_us) for e in events if e.kind == "B"] == [(0, 5), (1, 5), (2, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_does_two_things_at_once(schedule: Schedule) -> None:
    """On 60 random pipelines: per stage, and per direction of a link, events follow each other without overlap."""
    rng = random.Random(7)
    links_seen = 0
    for _ in range(60):
        num_stages = rng.randint(1, 6)
        stages = random_stages(rng, num_stages)
        actions = actions_of(schedule, num_stages=num_stages, micro_batches=num_stages + rng.randint(0, 8))
        tracks: dict[tuple[str, int], list[Event]] = {}
        for event in simulate(actions, stages):
            tracks.setdefault(("compute" if event.kind in "FB" else event.kind, event.stage), []).append(event)
        assert len([kind for kind, _ in tracks if kind == "compute"]) == num_stages
        links_seen += len(tracks) - num_stages
        for events in tracks.values():
            assert all(e.end_us >= e.start_us for e in events)
            assert all(
                a.end_us <= b.start_us for a, b in pairwise(sorted(events, key=lambda e: (e.start_us, e.end_us)))
            )
    assert links_seen > 20


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_starts_before_what_it_needs(schedule: Schedule) -> None:
    """F waits for the previous stage's F and the transfer, B for the next stage's B and the transfer, in list order."""
    rng = random.Random(11)
    checked = 0
    for _ in range(40):
        num_stages = rng.randint(2, 5)
        stages = random_stages(rng, num_stages)
        actions = actions_of(schedule, num_stages=num_stages, micro_batches=num_stages + 3)
        events = {(e.kind, e.stage, e.micro_batch): e for e in simulate(actions, stages)}
        assert len([1 for kind, _, _ in events if kind in "FB"]) == sum(map(len, actions))
        for (kind, at, i), event in events.items():
            source = at - 1 if kind == "F" else at + 1
            if kind not in "FB" or not 0 <= source < num_stages:
                continue
            crossing = stages[min(at, source)].send_us
            assert event.start_us >= events[kind, source, i].end_us + crossing - 1e-9
            checked += 1
        for at, todo in enumerate(actions):
            ends = [events[action.kind, at, action.micro_batch] for action in todo]
            assert all(a.end_us <= b.start_us for a, b in pairwise(ends))
    assert checked > 500


def test_a_stage_waits_no_longer_than_it_must() -> None:
    """Every action starts when its stage is free or its input arrives, whichever is later; here on unequal stages."""
    stages = [stage(5, 1, send=2), stage(1, 8, send=0.5), stage(4, 4)]
    actions = actions_of("1f1b", num_stages=3, micro_batches=6)
    events = {(e.kind, e.stage, e.micro_batch): e for e in simulate(actions, stages)}
    for at, todo in enumerate(actions):
        free = 0.0
        for action in todo:
            source = at - 1 if action.kind == "F" else at + 1
            arrival = 0.0
            if 0 <= source < 3:
                sent = events.get((f"send {action.kind}", source, action.micro_batch))
                assert sent is not None
                arrival = sent.end_us
            event = events[action.kind, at, action.micro_batch]
            assert event.start_us == max(free, arrival)
            free = event.end_us


def test_events_come_sorted_by_start() -> None:
    """What a picture draws from left to right."""
    events = simulate(
        actions_of("1f1b", num_stages=3, micro_batches=5), [stage(1, 2, send=1), stage(3, 1, send=2), stage(2, 2)]
    )
    starts = [event.start_us for event in events]
    assert starts == sorted(starts)
    assert len(events) == 3 * 5 * 2 + 2 * 5 * 2


def test_waiting_in_a_circle_is_reported() -> None:
    """Stage 0 wants B0 before F0, so nobody can begin: an error that says where each stage stands, no endless loop."""
    lists = [[Action("B", 0), Action("F", 0)], [Action("F", 0), Action("B", 0)]]
    with pytest.raises(ValueError, match=r"deadlock.*B0.*F0"):
        simulate(lists, [stage(1, 1), stage(1, 1)])


def test_waiting_for_what_never_comes_is_reported_when_others_are_done() -> None:
    """Stage 0 finishes its only forward, stage 1 waits for one that nobody computes: the same error."""
    with pytest.raises(ValueError, match=r"deadlock.*F1"):
        simulate([[Action("F", 0)], [Action("F", 1)]], [stage(1, 1), stage(1, 1)])


def test_a_backward_without_its_forward_is_reported() -> None:
    """The last stage cannot run B1 before F1."""
    with pytest.raises(ValueError, match="deadlock"):
        simulate([[Action("F", 0), Action("B", 1), Action("F", 1), Action("B", 0)]], [stage(1, 1)])
