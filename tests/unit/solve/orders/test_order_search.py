"""Search of action orders for given stages, compared with published bubbles and with all orders of tiny pipelines."""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from planner.core.cost.simulate import StageTimes, period_us
from planner.core.schedule import SCHEDULES, Action, Letter
from planner.core.schedule.validity import check_orders
from planner.core.values.placement import Placement, stages_on
from planner.solve.orders import order_search
from planner.solve.orders.list_scheduling import follow_order
from planner.solve.orders.order_changes import critical_actions
from planner.solve.orders.order_problem import ApproximateStageMemory, OrderProblem
from planner.solve.orders.order_search import OrderSearch, estimated_least_period_us

Rows = tuple[tuple[Action, ...], ...]

# K, M; F, I, W, T in ms; M_W / M_B; bubbles of ZB-1p at the limit K M_B and of ZB-2p at 2 K M_B: Qi et al. 2023
# (arXiv:2401.10241), tables 5 and 6.
PUBLISHED = [
    ((8, 24), (18.522, 18.086, 9.337, 0.601), 0.366, (0.1585, 0.0433)),
    ((8, 32), (18.513, 18.086, 9.331, 0.626), 0.366, (0.1242, 0.0039)),
    pytest.param((8, 24), (29.718, 29.444, 19.927, 0.527), 0.432, (0.1323, 0.0029), marks=pytest.mark.nightly),
    pytest.param((8, 32), (29.802, 29.428, 19.530, 0.577), 0.432, (0.1045, 0.0022), marks=pytest.mark.nightly),
    pytest.param((32, 96), (10.419, 10.207, 7.715, 0.408), 0.432, (0.1421, 0.0038), marks=pytest.mark.nightly),
]


def stage(forward: float, inputs: float, weights: float, send: float = 0.0) -> StageTimes:
    both = inputs + weights
    return StageTimes(
        forward_us=forward,
        backward_us=both,
        last_backward_us=both,
        send_us=send,
        input_backward_us=inputs,
        last_input_backward_us=inputs,
        weight_backward_us=weights,
    )


def problem(
    times: Sequence[StageTimes],
    micro_batches: int,
    limits: Sequence[float],
    *,
    between: float = 1.0,
    num_devices: int | None = None,
    placement: Placement = "loop",
) -> OrderProblem:
    devices = num_devices or len(times)
    return OrderProblem(
        stages_by_device=tuple(stages_on(d, devices, len(times) // devices, placement) for d in range(devices)),
        micro_batches=micro_batches,
        times=tuple(times),
        footprints=(ApproximateStageMemory(always=0.0, held=1.0, between=between, above=0.0),) * len(times),
        is_whole=(False,) * len(times),
        limits_bytes=tuple(limit + 1e-9 for limit in limits),
        between_steps_us=(0.0,) * devices,
    )


def most_held(row: Sequence[Action], between: float) -> float:
    held = most = 0.0
    for action in row:
        held += {"F": 1.0, "I": between - 1.0, "W": -between}[action.kind]
        most = max(most, held)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize(("size", "durations", "between", "bubbles"), PUBLISHED)
def test_bubble_is_at_most_that_of_published_searches(size, durations, between, bubbles, limit):
    """The memory limits are that of 1F1B and twice that, as published."""
    (devices, micro_batches), (forward, inputs, weights, send), published = size, durations, bubbles[limit]
    times = [stage(forward, inputs, weights, send if k + 1 < devices else 0.0) for k in range(devices)]
    asked = problem(times, micro_batches, [(limit + 1) * devices] * devices, between=between)
    found = OrderSearch(asked, lambda _: True).search(700_000)
    assert 1 - micro_batches * (forward + inputs + weights) / found.period_us <= published + 5e-5
    assert found.period_us >= estimated_least_period_us(asked) * (1 - 1e-9)
    assert all(most_held(row, between) <= (limit + 1) * devices + 1e-9 for row in found.rows)


def test_lower_bound_equals_the_published_bubble() -> None:
    """The work on the last device bounds the bubble of ZB-2p in the first row."""
    (devices, micro_batches), (forward, inputs, weights, send), between, (_, published) = PUBLISHED[0]
    times = [stage(forward, inputs, weights, send if k + 1 < devices else 0.0) for k in range(devices)]
    asked = problem(times, micro_batches, [2 * devices] * devices, between=between)
    least = 1 - micro_batches * (forward + inputs + weights) / estimated_least_period_us(asked)
    assert least == pytest.approx(published, abs=5e-5)


def every_order(micro_batches: int, stage_index: int) -> Iterator[tuple[Action, ...]]:
    """Yield all orders of F, I and W of a stage that keep the micro-batches of each kind in order."""

    def longer(row: tuple[Action, ...], done: tuple[int, int, int]) -> Iterator[tuple[Action, ...]]:
        if done == (micro_batches,) * 3:
            yield row
        for place, kind in enumerate(_KINDS):
            if done[place] < (micro_batches if place == 0 else done[place - 1]):
                more = (*done[:place], done[place] + 1, *done[place + 1 :])
                yield from longer((*row, Action(stage_index, kind, done[place])), more)

    return longer((), (0, 0, 0))


_KINDS: tuple[Letter, ...] = ("F", "I", "W")


def slow_period(rows: Sequence[Sequence[Action]], times: Sequence[StageTimes]) -> float:
    """Return the period by an independent simulator of split backwards; infinite for deadlocks."""
    place = {(a.kind, a.stage): d for d, row in enumerate(rows) for a in row}
    links: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[str, int, int], float] = {("F", 0, i): 0.0 for i in range(len(rows[0]))}
    left, free = [list(row) for row in rows], [0.0] * len(rows)
    starts = [float("nan")] * len(rows)
    while any(left):
        able = [d for d, row in enumerate(left) if row and (row[0].kind, row[0].stage, row[0].micro_batch) in arrived]
        if not able:
            return float("inf")
        d = able[0]
        a = left[d].pop(0)
        t = times[a.stage]
        duration = {"F": t.forward_us, "I": t.input_backward_us, "W": t.weight_backward_us}[a.kind]
        begin = max(free[d], arrived[a.kind, a.stage, a.micro_batch])
        starts[d] = begin if starts[d] != starts[d] else starts[d]
        end = free[d] = begin + duration
        if a.kind == "I":
            arrived["W", a.stage, a.micro_batch] = end
        if a.kind == "F" and a.stage + 1 == len(times):
            arrived["I", a.stage, a.micro_batch] = end
        target = a.stage + {"F": 1, "I": -1, "W": len(times)}[a.kind]
        if 0 <= target < len(times):
            other = place[a.kind, target]
            if other != d:
                end = links[d, other] = max(end, links.get((d, other), 0.0)) + times[min(a.stage, target)].send_us
            arrived[a.kind, target, a.micro_batch] = end
    return max(f - s for f, s in zip(free, starts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), pytest.param(3, 3, marks=pytest.mark.nightly)],
)
def test_order_search_equals_brute_force_of_tiny_pipelines(devices: int, micro_batches: int) -> None:
    """Another simulator evaluates the orders; stages and links are uneven, and memory is limited."""
    rng = random.Random(devices * 10 + micro_batches)
    rounds = 1 if devices * micro_batches == 9 else 6  # up to 42^3 orders
    for _ in range(rounds):
        times = [
            stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3), rng.choice((0.0, 0.7)))
            for _ in range(devices)
        ]
        limits = [rng.choice((1.0, 1.5, 2.0, 3.0)) for _ in range(devices)]
        between = rng.choice((0.4, 1.0))

        def fits(rows: Rows, limits: Sequence[float] = limits, between: float = between) -> bool:
            return all(most_held(row, between) <= limit + 1e-9 for row, limit in zip(rows, limits, strict=True))

        every = [
            [row for row in every_order(micro_batches, s) if most_held(row, between) <= limits[s] + 1e-9]
            for s in range(devices)
        ]
        best = min(slow_period(rows, times) for rows in product(*every))
        asked = problem(times, micro_batches, limits, between=between)
        found = OrderSearch(asked, fits).search(100_000)
        assert estimated_least_period_us(asked) <= best * (1 + 1e-9)
        assert found.period_us == pytest.approx(best, rel=1e-9)


def every_mixed_order(micro_batches: int, stage_index: int) -> Iterator[tuple[Action, ...]]:
    """Yield all orders of a stage in which each micro-batch has B, or I and a later W."""
    either: tuple[Letter, ...] = ("B", "I")
    for kinds in product(either, repeat=micro_batches):
        backwards = [Action(stage_index, kind, n) for n, kind in enumerate(kinds)]
        weights = [Action(stage_index, "W", a.micro_batch) for a in backwards if a.kind == "I"]
        forwards = tuple(Action(stage_index, "F", n) for n in range(micro_batches))
        for row in interleavings(forwards, tuple(backwards), tuple(weights)):
            place = {(a.kind, a.micro_batch): n for n, a in enumerate(row)}
            if all(place["F", a.micro_batch] < place[a.kind, a.micro_batch] for a in backwards) and all(
                place["I", a.micro_batch] < place["W", a.micro_batch] for a in weights
            ):
                yield row


def costly_split(forward: float, inputs: float, weights: float, send: float = 0.0) -> StageTimes:
    """Return a stage whose split backward takes a fifth longer than its whole backward."""
    whole = (inputs + weights) / 1.2
    return replace(stage(forward, inputs, weights, send), backward_us=whole, last_backward_us=whole)


def test_mix_of_whole_and_split_backwards_equals_brute_force() -> None:
    """Some of the pipelines are faster with a mix than with one kind of backward."""
    rng, num_mixed = random.Random(2), 0
    for _ in range(3):
        times = [costly_split(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3)) for _ in range(2)]
        asked = problem(times, 2, [2.0, 2.0])
        found = OrderSearch(asked, lambda _: True).search(20_000)
        assert found is not None
        periods = {}
        for rows in product(*(list(every_mixed_order(2, s)) for s in range(2))):
            with suppress(ValueError):
                periods[rows] = period_us(rows, times, (0.0, 0.0))
        assert found.period_us == pytest.approx(min(periods.values()), rel=1e-9)
        kinds = [{a.kind for row in rows for a in row} for rows in periods]
        pure = min(us for us, some in zip(periods.values(), kinds, strict=True) if not {"B", "I"} <= some)
        num_mixed += found.period_us < pure * (1 - 1e-9)
    assert num_mixed


def test_backwards_are_merged_if_a_split_gains_nothing() -> None:
    times = [costly_split(1, 1, 1)] * 4
    asked = problem(times, 8, [4.0] * 4)
    found = OrderSearch(asked, lambda _: True).search(150_000)
    assert {a.kind for row in found.rows for a in row} == {"F", "I", "W", "B"}
    check_orders(found.rows, 8)
    assert found.period_us == pytest.approx(period_us(found.rows, times, (0.0,) * 4), rel=1e-9)
    whole = OrderSearch(replace(asked, is_whole=(True,) * 4), lambda _: True).search(150_000)
    assert found.period_us < whole.period_us


def interleavings(*rows: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    """Yield all orders of the actions that keep the order of each row."""
    if not any(rows):
        yield ()
    for n, row in enumerate(rows):
        if row:
            yield from ((row[0], *rest) for rest in interleavings(*rows[:n], row[1:], *rows[n + 1 :]))


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_bound_is_at_most_all_orders_of_two_chunks(placement: Placement) -> None:
    """The bound is reached if a device waits only for its other chunk."""
    rng, met = random.Random(9), 0
    for _ in range(12):
        times = [
            stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3), rng.choice((0.0, 0.7))) for _ in range(4)
        ]
        asked = problem(times, 1, [2.0, 2.0], num_devices=2, placement=placement)
        every = [
            [*interleavings(*(tuple(Action(s, kind, 0) for kind in _KINDS) for s in stages))]
            for stages in asked.stages_by_device
        ]
        best = min(slow_period(rows, times) for rows in product(*every))
        bound = estimated_least_period_us(asked)
        assert bound <= best * (1 + 1e-9)
        met += bound >= best * (1 - 1e-9)
    assert met


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zbv", "v-half"])
def test_period_equals_another_simulator(name: str) -> None:
    rng = random.Random(7)
    schedule = SCHEDULES[name]
    chunks = schedule.exact_chunks or 1
    for devices, micro_batches in ((2, 4), (3, 6), (4, 9)):
        times = [
            stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3), rng.uniform(0, 1))
            for _ in range(devices * chunks)
        ]
        rows = schedule.actions(devices, micro_batches, chunks)
        assert period_us(rows, times, [0.0] * devices) == pytest.approx(slow_period(rows, times), rel=1e-9)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_action_orders_are_valid_and_respect_limit_and_bound(placement: Placement) -> None:
    rng = random.Random(3)
    for _ in range(8):
        devices, chunks, micro_batches = rng.choice((2, 3, 4)), 2 if placement == "v" else 1, rng.choice((3, 5, 8))
        times = [stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3)) for _ in range(devices * chunks)]
        limits = [chunks * rng.uniform(2, 5) for _ in range(devices)]
        asked = problem(times, micro_batches, limits, num_devices=devices, placement=placement)
        found = OrderSearch(asked, lambda _: True).search(60_000)
        check_orders(found.rows, micro_batches)
        assert found.period_us >= estimated_least_period_us(asked) * (1 - 1e-9)
        assert found.period_us == pytest.approx(slow_period(found.rows, times), rel=1e-9)
        assert all(most_held(row, 1.0) <= limit + 1e-9 for row, limit in zip(found.rows, limits, strict=True))


def test_given_order_is_used_if_it_fits() -> None:
    """With even times and enough memory, the order of ZB-V has no idle time."""
    devices, micro_batches = 4, 8
    asked = problem([stage(1, 1, 1)] * 8, micro_batches, [2 * devices] * devices, num_devices=devices, placement="v")
    models = [SCHEDULES["zbv"].actions(devices, micro_batches, 2)]
    found = OrderSearch(asked, lambda _: True, models).search(20_000)
    assert found.period_us == 6 * micro_batches


def test_strictly_followed_orders_fit_and_become_faster() -> None:
    devices, micro_batches, rng = 3, 8, random.Random(0)
    times = [stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3)) for _ in range(2 * devices)]
    one_by_one = tuple(
        tuple(
            Action(s, kind, m)
            for m in range(micro_batches)
            for s, kind in [*((s, "F") for s in stages), *((s, kind) for s in reversed(stages) for kind in "IW")]
        )
        for stages in (stages_on(d, devices, 2, "v") for d in range(devices))
    )

    def fits(rows: Rows) -> bool:
        return all(most_held(row, 1.0) <= 3 for row in rows)

    asked = problem(times, micro_batches, [0.0] * devices, num_devices=devices, placement="v")
    found = OrderSearch(asked, fits).improve_without_lookahead(one_by_one, 60_000)
    check_orders(found.rows, micro_batches)
    assert fits(found.rows)
    assert found.period_us < 0.95 * slow_period(one_by_one, times)


def split_1f1b(device: int, in_flight: int, micro_batches: int) -> tuple[Action, ...]:
    row = [Action(device, "F", m) for m in range(in_flight)]
    for m in range(micro_batches):
        row += [Action(device, "I", m), Action(device, "W", m)]
        row += [Action(device, "F", m + in_flight)] * (m + in_flight < micro_batches)
    return tuple(row)


def test_search_continues_below_an_estimate_that_is_wrong() -> None:
    """According to the approximate memory model, each device can hold one micro-batch. In truth, four fit."""
    devices, micro_batches = 4, 8
    times = [stage(1, 1, 1)] * devices
    start = tuple(split_1f1b(d, min(2, devices - d), micro_batches) for d in range(devices))
    asked = problem(times, micro_batches, [1.0] * devices)
    search = OrderSearch(asked, lambda rows: all(most_held(row, 1.0) <= 4 for row in rows))
    assert slow_period(start, times) < estimated_least_period_us(asked)
    assert search.improve(start, 60_000).period_us < 0.95 * slow_period(start, times)


def test_moves_of_critical_actions_find_faster_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal budgets, on average over random pipelines."""
    devices, micro_batches, rng = 8, 16, random.Random(0)
    start = tuple(split_1f1b(d, min(2, devices - d), micro_batches) for d in range(devices))
    ratios = []
    for _ in range(3):
        times = [stage(rng.uniform(1, 4), rng.uniform(1, 4), rng.uniform(0.5, 3)) for _ in range(devices)]
        periods = []
        for critical in (critical_actions, lambda *_: []):
            monkeypatch.setattr(order_search, "critical_actions", critical)
            search = OrderSearch(
                problem(times, micro_batches, [1.0] * devices),
                lambda rows: all(most_held(row, 1.0) <= 4 for row in rows),
            )
            periods.append(search.improve_without_lookahead(start, 100_000).period_us)
        ratios.append(periods[0] / periods[1])
    assert sum(ratios) / len(ratios) < 0.9


def test_critical_path_of_the_documented_example() -> None:
    """Device 0 waits for the first gradient of device 1."""
    rows = [[(0, "F", 0), (0, "F", 1), (0, "I", 0), (0, "W", 0), (0, "I", 1), (0, "W", 1)]]
    rows.append([(1, "F", 0), (1, "I", 0), (1, "F", 1), (1, "I", 1), (1, "W", 0), (1, "W", 1)])
    order = follow_order(problem([stage(1, 1, 1)] * 2, 2, [4, 4]), rows, lookahead=1, patience=inf)
    assert order.waits == [[False, False, True, False, False, False], [True, *[False] * 5]]
    # Device 0 takes 7 from its first to its last action, device 1 takes 6.
    assert (order.rows, order.period_us, order.slowest) == (rows, 7, 0)
    assert critical_actions(order, 2) == [*reversed(rows[0][2:]), (1, "I", 0), (1, "F", 0), (0, "F", 0)]
