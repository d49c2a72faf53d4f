"""Search for the best order of unequal devices: GPipe's best cuts for every order of device kinds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from planner.core.errors import UsageError
from planner.solve.answer import Answer
from planner.solve.chain.bottlenecks import BottleneckSearch
from planner.solve.chain.chain_dp import ChainCuts
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMMING, search_gpipe
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.space.case import Case
from planner.solve.space.tables import width_for

MOST_ORDERS: Final = 20_000
"""Most orders, of any length; 7 different devices have 13,699, 7 devices of each of two kinds have 12,868."""

Kind = tuple[int, float]
"""Memory limit in bytes, and speed, of a device."""


def search_any_order(case: Case, *, upper_us: float = inf, deadline: Deadline = NEVER) -> Answer:
    """Return the fastest partition over all orders of devices, if it beats `upper_us`.

    Args:
        case: The case, under GPipe, with one link for all devices.
        upper_us: The step time to beat.
        deadline: Time limit; the lower bound is weak if it passes.

    Raises:
        OutOfTimeError: `deadline` passed before anything was found, and there is nothing to beat.
        UsageError: There are too many orders.

    Complexity: one dynamic program per order. Most end early, because they cannot beat the best previous order.
    """
    kinds = [(case.cluster.memory_bytes[d], case.cluster.speed(d)) for d in range(case.num_devices)]
    orders = _all_orders(kinds)
    best = search_gpipe(case, upper_us=upper_us, deadline=deadline)
    upper_us, bound_us = min(upper_us, best.step_us), best.lower_bound_us
    width = width_for(case.costs, longest_us=case.longest_us(upper_us), limit_bytes=max(case.limits_bytes))
    try:
        for order in orders:
            cuts = _search(case, kinds, order, width=width, deadline=deadline).best(upper_us=upper_us)
            if cuts is not None:
                best, upper_us = _answer(case, order, cuts), cuts.step_us
                bound_us = min(bound_us, upper_us)
    except OutOfTimeError:
        if best.partition is None and upper_us == inf:
            raise
        bound_us = case.bound_us
    return best._replace(lower_bound_us=bound_us)


def _search(
    case: Case, kinds: Sequence[Kind], order: tuple[int, ...], *, width: int, deadline: Deadline
) -> BottleneckSearch:
    """Return the search for exactly as many stages as there are devices in `order`."""
    memory_bytes, speeds = zip(*(kinds[device] for device in order), strict=True)
    cluster = replace(case.cluster, memory_bytes=memory_bytes, speeds=speeds)
    ordered = replace(case, cluster=cluster, num_devices=len(order))
    problem = ordered.problem(len(order), width=width, exact=True)
    return BottleneckSearch(problem, case.micro_batches, deadline=deadline)


def _answer(case: Case, order: tuple[int, ...], cuts: ChainCuts) -> Answer:
    devices = () if order == tuple(range(len(order))) else order
    partition = case.partition(cuts.cuts, cuts.choices, devices=devices)
    return Answer(case, partition, cuts.step_us, cuts.step_us, DYNAMIC_PROGRAMMING)


def _all_orders(kinds: Sequence[Kind]) -> list[tuple[int, ...]]:
    """Return every order of every subset of devices, equal devices by their index; longer orders first.

    Raises:
        UsageError: There are too many.
    """
    orders: list[tuple[int, ...]] = []
    for order in _orders(kinds):
        orders.append(order)
        if len(orders) > MOST_ORDERS:
            raise UsageError(
                f"`--devices-any-order`: {len(kinds)} devices of {len(set(kinds))} kinds have more than {MOST_ORDERS} "
                "orders",
                hint="give more devices the same `--mem` and `--speed`, or leave the option out and list devices in "
                "their order",
            )
    return sorted(orders, key=lambda order: (-len(order), order))


def _orders(kinds: Sequence[Kind], begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    next_of_kind: dict[Kind, int] = {}
    for device, kind in enumerate(kinds):
        if device not in begun:
            next_of_kind.setdefault(kind, device)
    for device in next_of_kind.values():
        yield (*begun, device)
        yield from _orders(kinds, (*begun, device))
