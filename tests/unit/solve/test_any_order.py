"""Lower bound for every action order: whole layers, and the least recomputation that memory requires."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.cost.peak_points import ALLOCATIONS, BACKWARDS, FORWARDS, INPUT_BACKWARDS
from planner.core.values.plan import Inputs
from planner.core.values.profile import LayerProfile, Profile
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.space.any_order import least_saved_bytes, least_us_in_any_order
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator
from tests.support.chains import chain, random_profile
from tests.support.profiles import inputs_of

GIGABYTE = 10**9


def case_of(profile: Profile, inputs: Inputs) -> Case:
    """Return the case of a searched schedule with one chunk."""
    request = Request(inputs=replace(inputs, schedule="search", chunks=1), micro_batches=inputs.batch)
    return cases_of(profile, request)[0]


def even_chain(num_layers: int) -> Profile:
    """Return layers with F = I = W = 1 us that save a gigabyte and have few parameters."""
    layers = [
        LayerProfile(
            name=f"layer_{n}",
            parameter_bytes=4,
            forward_us=(1.0,),
            backward_us=(2.0,),
            backward_input_us=(1.0,),
            backward_weight_us=(1.0,),
            output_bytes=(4,),
            saved_bytes=(GIGABYTE,),
            weight_held_bytes=(0,),
        )
        for n in range(num_layers)
    ]
    return chain(*layers)


@pytest.mark.parametrize("exact", [False, True])
def test_stage_holds_at_least_the_saved_bytes_of_its_layers(*, exact: bool) -> None:
    """Waiting micro-batches and running passes are checked, without recomputation."""
    num, places = 7, [ALLOCATIONS.index(name) for name in ("held", "kept", *FORWARDS, *BACKWARDS, *INPUT_BACKWARDS)]
    for seed in range(20):
        evaluator = Evaluator(case_of(random_profile(seed, num, exact=exact), inputs_of(2, 4)), 2, most_layers=num)
        costs = evaluator.case.costs
        before = np.concatenate([[0.0], np.cumsum(least_saved_bytes(costs))])
        for first in range(num):
            for end in range(first + 1, num + 1):
                sizes = evaluator.stage_allocation_bytes[0, end, first - end + num][1:]
                if costs.has_backward[end - 1]:
                    assert sizes[places].min() >= before[end] - before[first]


@pytest.mark.parametrize(("num_layers", "most"), [(4, 2), (5, 3), (9, 5)])
def test_bound_assigns_whole_layers_to_devices(num_layers: int, most: int) -> None:
    assert least_us_in_any_order(case_of(even_chain(num_layers), inputs_of(2, 4))) == pytest.approx(4 * most * 3.0)


def test_bound_includes_required_recomputation() -> None:
    """Of 8 layers on 2 devices that hold one layer's activations each, the first 3.27 are recomputed.

    Layer l stays 2 (8 - l) us for each of 16 micro-batches: 1,152 gigabytes times us in all. In T = 192 + 8 x us there
    are 2 T of them. Recomputing x = 3 to 4 layers saves 672 + 160 (x - 3), so 176 x = 576.
    """
    inputs = replace(inputs_of(2, 16), memory_bytes=(GIGABYTE,) * 2)
    case = case_of(even_chain(8), inputs)
    assert least_us_in_any_order(case) == pytest.approx(192 + 8 * 576 / 176, rel=1e-4)
    assert least_us_in_any_order(replace(case, policy="never")) == pytest.approx(1152 / 2, rel=1e-4)


def test_lower_bound_of_a_plan_includes_recomputation() -> None:
    inputs = replace(inputs_of(2, 16), memory_bytes=(2_200_000_000,) * 2, schedule="interleaved", chunks=4)
    plan = solve(even_chain(8), Request(inputs=inputs, micro_batches=16, searches_longer=False))
    assert 192 * 1.03 < plan.solver.lower_bound_us <= plan.predicted.step_us
