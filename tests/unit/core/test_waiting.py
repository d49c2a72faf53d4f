"""Waiting gradients of shared parameters in a backward, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.cost.allocations import stage_memory_by_allocation
from planner.core.cost.chain_costs import ChainCosts, TiedParameters
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import peak_bytes_of_stages, single_stage_memory_table, stage_memory
from planner.core.cost.waiting import waiting_gradients, waiting_gradients_in_stage
from planner.core.values.plan import Recompute
from tests.support.chains import even_chain
from tests.support.peak_points import peak_points_with

PARAMETERS = (80, 0, 100, 0, 100, 0)


def costs_of(*, tied: bool = True) -> ChainCosts:
    """Return six layers, of which the third and the fifth use the same parameters."""
    costs = costs_at(even_chain(PARAMETERS), 1)
    tie = TiedParameters(first=2, second=4, parameter_bytes=100.0, gradient_bytes=100.0, optimizer_bytes=0.0)
    return replace(costs, ties=(tie,) if tied else ())


def test_shared_gradient_waits_from_its_last_use_to_its_first() -> None:
    """Later backwards hold a second gradient meanwhile; in the first backward, the two become one before the first use.

    While the last use runs, 90 bytes wait, because its first backward is higher by the gradient that remains.
    """
    costs = costs_of()
    assert waiting_gradients_in_stage(costs, "later", 0, 6).tolist() == [0, 0, 100, 100, 90, 0]
    assert waiting_gradients_in_stage(costs, "first", 0, 6).tolist() == [-100, -100, 0, 0, 0, 0]


def test_sum_of_shared_gradients_may_be_a_new_tensor() -> None:
    """It exists with both gradients in the first use's backward. A third gradient is then added to it in place."""
    ties = [
        TiedParameters(first=a, second=b, parameter_bytes=100.0, gradient_bytes=100.0, optimizer_bytes=0.0, sum_bytes=s)
        for a, b, s in ((0, 2, 0.0), (2, 4, 100.0))
    ]
    costs = replace(costs_of(), ties=tuple(ties))
    assert waiting_gradients_in_stage(costs, "later", 0, 6).tolist() == [100, 100, 200, 100, 90, 0]
    assert waiting_gradients_in_stage(costs, "first", 0, 6).tolist() == [-100, -100, 100, 0, 0, 0]


@pytest.mark.parametrize(
    ("cast_bytes", "later", "first"),
    [
        (50.0, [-50, -50, 0, 0, 0, 0], [-100, -100, -50, -50, -90, 0]),
        (0.0, [0, 0, 100, 0, 0, 0], [-100, -100, 0, 0, 0, 0]),
    ],
)
def test_gradients_of_autocast_copies_wait_only_for_a_use_without_a_copy(
    cast_bytes: float, later: list[int], first: list[int]
) -> None:
    """Such a use, as that in an embedding, gets the converted gradient.

    Other uses have the same copy, whose gradient of 50 bytes would count twice in the sum over later layers. In the
    first backward, it is converted in the first use.
    """
    costs = costs_of()
    costs = replace(costs, ties=(replace(costs.ties[0], cast_bytes=cast_bytes, converted_bytes=100.0),))
    assert waiting_gradients_in_stage(costs, "later", 0, 6).tolist() == later
    assert waiting_gradients_in_stage(costs, "first", 0, 6).tolist() == first


@pytest.mark.parametrize(("first", "end"), [(0, 4), (3, 6), (4, 6)])
def test_stage_with_one_use_has_no_waiting_gradients(first: int, end: int) -> None:
    costs = costs_of()
    for backward in ("first", "later"):
        assert not waiting_gradients_in_stage(costs, backward, first, end).any()


def test_waiting_gradients_of_many_stages_equal_those_of_each() -> None:
    ties = [TiedParameters(first=a, second=b, parameter_bytes=s, gradient_bytes=s, optimizer_bytes=0.0)
            for a, b, s in ((0, 3, 7.0), (3, 5, 7.0), (2, 4, 20.0), (2, 5, 1.0))]  # fmt: skip
    costs = replace(costs_of(), ties=tuple(ties))
    layers = np.arange(6)
    table = np.zeros((6, 6, 6))
    for waiting in waiting_gradients(costs, "later", layers, layers=layers, ends=layers):
        table[waiting.rows] = waiting.bytes
    for first in range(6):
        for last in range(first, 6):
            assert (
                table[first, first : last + 1, last].tolist()
                == waiting_gradients_in_stage(costs, "later", first, last + 1).tolist()
            )
    whole = peak_bytes_of_stages(costs, layers, slice(0, 6), peak_points_with(3), choices=["never"])[0]
    for first in range(6):
        for last in range(first, 6):
            alone = stage_memory(costs, first, last + 1, peak_points_with(3), recompute="never")
            assert whole[first, last] == alone.total


def test_backward_levels_include_waiting_gradients() -> None:
    """Recomputing no layer gives the same levels."""

    def moments(*, tied: bool, recompute: Recompute) -> tuple[float, float]:
        stages, _ = single_stage_memory_table(
            costs_of(tied=tied), 0, 6, micro_batches=3, recompute=recompute, recomputed=()
        )
        memory = stage_memory_by_allocation(stages, recompute, in_flight=3)
        sums = {
            moment[-1][0]: sum(float(size[0, -1]) for size in memory.at(moment).values())
            for moment in peak_points_with(3).alike
        }
        return sums["first_backward"], sums["backward"]

    tied, apart = moments(tied=True, recompute="never"), moments(tied=False, recompute="never")
    # Without the 100 of parameters: after the first layer, 60 + 80 and both gradients. The third layer is higher now:
    # one gradient waits for the other, 56 held + 60 + 100 + 100.
    assert tied[0] == apart[0] - 100 - (340 - 316)
    # 100 of gradients, too; but 90 wait in the fifth layer's backward, 112 held + 70, and the highest was the last one,
    # 140 held + 70.
    assert tied[1] == apart[1] - 200 + (112 + 70 + 90) - (140 + 70)
    assert moments(tied=True, recompute="layers") == tied
