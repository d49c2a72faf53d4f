"""Validity of action orders from any source, and errors for invalid ones."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    check_orders,
    execution_order,
    instruction_lists,
    needed_message,
)
from planner.core.schedule.table import orders_from_csv

Lists = list[list[Action]]


def lists_in(text: str) -> Lists:
    """Return the action orders of a text with a row per device, separated by slashes: `0F0,0B0 / 1F0,1B0`."""
    return [list(row) for row in orders_from_csv(text.replace(" / ", "\n"))]


def at_random(draw: random.Random, num_devices: int, chunks: int, micro_batches: int) -> Lists:
    """Return valid action orders, drawn from the runnable actions at each point."""
    stages = list(range(num_devices * chunks))
    draw.shuffle(stages)
    device_of = {stage: place % num_devices for place, stage in enumerate(stages)}
    left = []
    for stage in stages:
        for i in range(micro_batches):
            left += [Action(stage, kind, i) for kind in draw.choice(["FB", "FIW"])]
    rows: Lists = [[] for _ in range(num_devices)]
    over: set[object] = set()
    while left:
        can = [action for action in left if is_ready(action, len(stages), over)]
        action = draw.choice(can)
        left.remove(action)
        rows[device_of[action.stage]].append(action)
        over.add((action.kind if action.kind != "I" else "B", action.stage, action.micro_batch))
    return rows


def is_ready(action: Action, num_stages: int, over: set[object]) -> bool:
    """Return True if all dependencies are done; a backward also needs its own forward."""
    need = needed_message(action.kind, action.stage, num_stages)
    waits = [] if need is None else [(need.message_kind, need.stage, action.micro_batch)]
    return set(waits) <= over


sizes = st.tuples(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
"""Seed, K, V, M."""


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_runnable_action_orders_are_valid(size: tuple[int, int, int, int]) -> None:
    """Stages lie anywhere, and whole and split backwards are mixed."""
    seed, num_devices, chunks, micro_batches = size
    rows = at_random(random.Random(seed), num_devices, chunks, micro_batches)
    check_orders(rows, micro_batches)
    assert sorted(map(str, execution_order(rows))) == sorted(str(action) for row in rows for action in row)
    runs = [[x for x in row if x.do == "run"] for row in instruction_lists(rows)]
    assert [[f"{x.stage}{x.kind}{x.micro_batch}" for x in row] for row in runs] == [list(map(str, r)) for r in rows]


def mutated(draw: random.Random, rows: Lists) -> Lists:
    """Return the action orders with one fault."""
    device = draw.choice([device for device, row in enumerate(rows) if row])
    row = rows[device]
    place = draw.randrange(len(row))
    action = row[place]
    match draw.choice(["drop", "twice", "kind", "stage", "micro-batch", "device", "order"]):
        case "drop":
            del row[place]
        case "twice":
            row.insert(draw.randrange(len(row) + 1), action)
        case "kind":
            kind = draw.choice([kind for kind in "FBIW" if kind != action.kind])
            row[place] = Action(action.stage, kind, action.micro_batch)
        case "stage":
            row[place] = Action(action.stage + draw.choice([-1, 1]), action.kind, action.micro_batch)
        case "micro-batch":
            row[place] = Action(action.stage, action.kind, action.micro_batch + draw.choice([-1, 1]))
        case "device" if len(rows) > 1:
            row.remove(action)
            other = draw.choice([other for other in range(len(rows)) if other != device])
            rows[other].insert(draw.randrange(len(rows[other]) + 1), action)
        case _:
            forward = next(a for a in row if a.kind == "F")
            row.remove(forward)
            later = next(
                n for n, a in enumerate(row) if (a.stage, a.micro_batch) == (forward.stage, forward.micro_batch)
            )
            row.insert(later + 1, forward)
    return rows


@settings(max_examples=200, deadline=None)
@given(sizes)
def test_single_faults_are_refused(size: tuple[int, int, int, int]) -> None:
    seed, num_devices, chunks, micro_batches = size
    draw = random.Random(seed)
    rows = mutated(draw, at_random(draw, num_devices, chunks, micro_batches))
    with pytest.raises(UsageError) as refused:
        check_orders(rows, micro_batches)
    assert refused.value.hint


@settings(max_examples=200, deadline=None)
@given(sizes)
def test_swapped_actions_are_refused_exactly_if_they_cannot_run(size: tuple[int, ...]) -> None:
    """The reference is an independent run of the action orders."""
    seed, num_devices, chunks, micro_batches = size
    draw = random.Random(seed)
    rows = at_random(draw, num_devices, chunks, micro_batches)
    for _ in range(3):
        row = draw.choice(rows)
        place = draw.randrange(len(row))
        row[place : place + 2] = row[place : place + 2][::-1]
    if runs_to_its_end(rows):
        check_orders(rows, micro_batches)
    else:
        with pytest.raises(UsageError):
            check_orders(rows, micro_batches)


def runs_to_its_end(rows: Sequence[Sequence[Action]]) -> bool:
    """Return True if all devices finish when each runs its actions as far as possible."""
    num_stages = len({action.stage for row in rows for action in row})
    at, over = [0] * len(rows), set[object]()
    went_on = True
    while went_on:
        went_on = False
        for device, row in enumerate(rows):
            while at[device] < len(row) and is_ready(row[at[device]], num_stages, over):
                action = row[at[device]]
                over.add((action.kind if action.kind != "I" else "B", action.stage, action.micro_batch))
                at[device], went_on = at[device] + 1, True
    return all(n == len(row) for n, row in zip(at, rows, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.name)
def test_named_schedules_are_valid(schedule: Schedule) -> None:
    tried = 0
    for num_devices, micro_batches, chunks in product(range(1, 9), (1, 2, 3, 4, 6, 8, 13, 16, 24), (1, 2, 3)):
        try:
            orders = schedule.actions(num_devices, micro_batches, chunks)
        except UsageError:
            continue
        check_orders(orders, micro_batches)
        tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("text", "micro_batches", "message"),
    [
        ("0F0", 1, "device 0: micro-batch 0 passes stage 0 by 0F0"),
        ("0F0,0I0", 1, "device 0: micro-batch 0 passes stage 0 by 0F0, 0I0"),
        ("0F0,0B0,0W0", 1, "device 0: micro-batch 0 passes stage 0 by 0F0, 0B0, 0W0"),
        ("0F0,0B0", 2, "device 0: micro-batch 1 passes stage 0 by no action"),
        ("0F0,0B0,0F1,0B1", 1, "device 0: 0F1 needs micro-batch 1, there are 1"),
        ("0F0,0B0,0F0", 1, "device 0: 0F0 occurs twice"),
        ("0B0,0F0", 1, "deadlock: device 0 cannot start 0B0 before 0F0 (device 0)"),
        ("0F0,0W0,0I0", 1, "deadlock: device 0 cannot start 0W0 before 0I0 (device 0)"),
        ("0F0,0B0,1F0,1I0,1W0", 1, "deadlock: device 0 cannot start 0B0 before 1I0 (device 0)"),
        ("0F0,0B0 / 0F1,1F0", 2, "device 1: stage 0 of 0F1 is on device 0"),
        ("0F0,0B0 / 2F0,2B0", 1, "no device has stage 1, device 1 has stage 2"),
        ("0F0,0B0,1F0,1B0 / 2F0,2B0", 1, "device 1 has 1 stages, device 0 has 2"),
        (
            "0F0,0B0,0F1,0B1 / 1F0,1F1,1I0,1W0,1B1",
            2,
            (
                "deadlock: device 0 cannot start 0B0 before 1I0 (device 1), "
                "device 1 cannot start 1F1 before 0F1 (device 0)"
            ),
        ),
    ],
)
def test_errors_name_device_action_and_fault(text: str, micro_batches: int, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_orders(lists_in(text), micro_batches)
    assert refused.value.message == message


@pytest.mark.parametrize(("rows", "message"), [([], "no action orders"), ([[]], "device 0 has no action")])
def test_action_orders_without_actions_are_refused(rows: Lists, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_orders(rows, 1)


def test_error_of_a_long_deadlock_names_four_devices() -> None:
    rows = [[Action(k, "B", 0), Action(k, "F", 0)][::-1] for k in range(7)]
    rows[6] = [Action(6, "F", 1), Action(6, "F", 0), Action(6, "B", 0), Action(6, "B", 1)]
    for k in range(6):
        rows[k] += [Action(k, "F", 1), Action(k, "B", 1)]
    with pytest.raises(UsageError, match=r"device 3 cannot start 3B0 before 4B0 \(device 4\), and 3 more$"):
        check_orders(rows, 2)
