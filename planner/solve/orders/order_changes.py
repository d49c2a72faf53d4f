"""Changes of an action order in a local search: moves of actions, and merges and splits of backwards.

Moving an action that is not on a critical path rarely changes the step time. Example with K = 2 devices, M = 2
micro-batches and F = I = W = 1; the cell 1F0 is stage 1, action F, micro-batch 0. Device 0 needs seven units of time
from its first to its last action, and waits for 1I0. So the critical path is 0F0, 1F0, 1I0, and then the last four
actions of device 0:

                                           time    0   1   2   3   4   5   6
                                           dev. 0  0F0 0F1     0I0 0W0 0I1 0W1
                                           dev. 1      1F0 1I0 1F1 1I1 1W0 1W1

Source: van Laarhoven, Aarts and Lenstra 1992, "Job Shop Scheduling by Simulated Annealing" (doi:10.1287/opre.40.1.113).
"""

import random
from collections.abc import Sequence

from planner.solve.orders.list_scheduling import Act, ActionOrder
from planner.solve.orders.order_problem import OrderProblem

_CRITICAL_SHARE = 0.8
"""Probability that a move is of a critical action."""

_PLACES = (-12, -9, -6, -4, -3, -2, -1, -1, 1, 1, 2, 3, 4, 6, 9, 12)
"""Numbers of positions by which an action may move."""


def critical_actions(order: ActionOrder, num_stages: int) -> list[Act]:
    """Return the actions of a critical path, from the last one to the first.

    The path ends with the last action of the slowest device. If a device waited before an action, the action before it
    in the path is the one whose result it waited for; otherwise it is the previous action of the device.

    Args:
        order: The simulated order.
        num_stages: Number of stages of the pipeline.
    """
    places = {act: (device, n) for device, row in enumerate(order.rows) for n, act in enumerate(row)}
    device, n = order.slowest, len(order.rows[order.slowest]) - 1
    path = []
    while n >= 0:
        act = order.rows[device][n]
        path.append(act)
        senders = _senders(act, num_stages) if order.waits[device][n] else ()
        device, n = next((places[sender] for sender in senders if sender in places), (device, n - 1))
    return path


def _senders(act: Act, num_stages: int) -> tuple[Act, ...]:
    # The actions of which one computes the input of `act`, if it is not an input of the pipeline.
    stage, kind, micro_batch = act
    if kind == "F":
        return ((stage - 1, "F", micro_batch),)
    if kind == "W":
        return ()  # its input was computed on the same device
    if stage == num_stages - 1:
        return ((stage, "F", micro_batch),)
    return (stage + 1, "I", micro_batch), (stage + 1, "B", micro_batch)


def move_actions(
    problem: OrderProblem, rows: Sequence[Sequence[Act]], rng: random.Random, critical: Sequence[Act] = ()
) -> list[list[Act]]:
    """Return an order in which random actions have moved, on one device or on several.

    The micro-batches of each kind of action of a stage still ascend.

    Args:
        problem: The stages.
        rows: Actions of each device, in order.
        rng: Source of random numbers.
        critical: Actions of a critical path. Most moves choose one of these actions. If there are none, all actions are
            equally likely.
    """
    changed = [*map(list, rows)]
    for _ in range(rng.choice((1, 2))):
        if critical and rng.random() < _CRITICAL_SHARE:
            stage, kind, micro_batch = rng.choice(critical)
            device = next(d for d, stages in enumerate(problem.stages_by_device) if stage in stages)
            chunk = problem.stages_by_device[device].index(stage)
        else:
            kind, micro_batch = rng.choice(rows[0])[1], rng.randrange(problem.micro_batches)
            chunk, device = rng.randrange(len(problem.stages_by_device[0])), rng.randrange(len(rows))
        step = rng.choice(_PLACES)
        for each in rng.choice((range(device, device + 1), range(device, len(rows)), range(device + 1))):
            _move(changed[each], (problem.stages_by_device[each][chunk], kind, micro_batch), step)
    return changed


def _move(row: list[Act], act: Act, step: int) -> None:
    if act not in row:
        return  # this stage has another kind of backward than the stage that `act` was chosen from
    place = row.index(act)
    target = min(max(0, place + step), len(row) - 1)
    row.insert(target, row.pop(place))
    passed = range(min(place, target), max(place, target) + 1)
    alike = [n for n in passed if row[n][:2] == act[:2]]
    for n, number in zip(alike, sorted(row[n][2] for n in alike), strict=True):
        row[n] = (*act[:2], number)


def merge_or_split_backwards(
    problem: OrderProblem, rows: Sequence[Sequence[Act]], rng: random.Random
) -> list[list[Act]]:
    """Return an order in which random backwards of a stage, or of stages on several devices, are merged or split.

    Args:
        problem: The stages.
        rows: Actions of each device, in order.
        rng: Source of random numbers.
    """
    changed = [*map(list, rows)]
    num_chunks = len(problem.stages_by_device[0])
    chunk, device, first = (rng.randrange(n) for n in (num_chunks, len(rows), problem.micro_batches))
    devices = rng.choice((range(device, device + 1), range(device, len(rows)), range(device + 1)))
    numbers = rng.choice((range(first, first + 1), range(problem.micro_batches)))
    to_whole = rng.choice((True, False))
    for each in devices:
        stage = problem.stages_by_device[each][chunk]
        chosen = {(stage, "I" if to_whole else "B", m) for m in numbers}.intersection(changed[each])
        whole = {(stage, m) for _, _, m in chosen}
        row: list[Act] = []
        for act in changed[each]:
            if act in chosen:
                row += [(stage, "B", act[2])] if to_whole else [(stage, "I", act[2]), (stage, "W", act[2])]
            elif act[1] != "W" or (act[0], act[2]) not in whole:
                row.append(act)
        changed[each] = row
    return changed
