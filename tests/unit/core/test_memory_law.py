"""Sizes of allocations times their counts: closed forms compared with a walk through the action order."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner.core.cost.allocations import stage_memory_by_allocation
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import single_stage_memory_table, stage_memory
from planner.core.cost.peak_points import (
    ALLOCATIONS,
    AllocationName,
    AllocationsAtPoint,
    peak_allocation_counts,
    stage_peak_points,
)
from planner.core.schedule import GPIPE, ONE_FORWARD_ONE_BACKWARD
from planner.core.values.plan import Recompute
from tests.support.chains import chain, layer, random_profile, record, tensor

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")


# ---- counts


def sizes_of(seed: int, *, stage: int, num_stages: int, last_differs: bool) -> dict[AllocationName, int]:
    """Return random bytes of every allocation that respect the relations between allocations."""
    draw = np.random.default_rng(seed)
    sizes: dict[AllocationName, int] = dict(
        zip(ALLOCATIONS, draw.integers(0, 1000, len(ALLOCATIONS)).tolist(), strict=True)
    )
    sizes |= {"input": sizes["input"] * (stage > 0), "input_gradient": sizes["input_gradient"] * (stage > 0)}
    sizes |= {"output_gradient": sizes["output_gradient"] * (stage < num_stages - 1)}
    # Whatever waits holds the input, which is as large as its gradient.
    sizes |= {"held": sizes["held"] + sizes["input"], "kept": sizes["kept"] + sizes["input"]}
    sizes |= {"input_gradient": min(sizes["input"], sizes["input_gradient"])}
    if not last_differs:
        alike: dict[AllocationName, AllocationName] = {
            "kept": "held",
            "last_forward": "forward",
            "last_backward": "backward",
        }
        sizes |= {name: sizes[other] for name, other in alike.items()}
    return sizes


def bytes_at(point: AllocationsAtPoint, sizes: dict[AllocationName, int]) -> int:
    return sum(count * sizes[name] for name, count in point)


@pytest.mark.parametrize("schedule", [GPIPE, ONE_FORWARD_ONE_BACKWARD], ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 2, 4])
@pytest.mark.parametrize("last_differs", [False, True])
def test_closed_forms_have_the_peak_of_the_whole_action_order(schedule, num_stages, more, *, last_differs):
    micro_batches = num_stages + more
    walks = peak_allocation_counts(schedule.actions(num_stages, micro_batches))
    for k, walk in enumerate(walks):
        points = stage_peak_points(schedule, micro_batches=micro_batches, num_later=num_stages - 1 - k)
        for seed in range(40):
            sizes = sizes_of(seed, stage=k, num_stages=num_stages, last_differs=last_differs)
            closed = [bytes_at(point, sizes) for point in (points.apart if last_differs else points.alike)]
            assert max(closed) == (walk[:, 0] @ [sizes[name] for name in ALLOCATIONS]).max()


def test_number_of_peak_points_does_not_grow_with_micro_batches() -> None:
    for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD):
        few, many = (stage_peak_points(schedule, micro_batches=m, num_later=3) for m in (8, 4096))
        assert len(many.apart) == len(few.apart) <= 9
        assert len(many.alike) == len(few.alike) <= 6


def test_1f1b_with_as_many_micro_batches_as_stages_by_hand() -> None:
    """Stage 0 fills and drains as under GPipe, without early gradients before the first backward."""
    heavy = record(internal=10, made=[tensor(6)], forward=20, no_grad=10, first_backward=60, backward=95)
    layers = [layer("a", parameter_bytes=50, detail=heavy)]
    layers += [layer(name, detail=record(given=[tensor(6)], made=[tensor(6)])) for name in "bc"]
    costs = costs_at(chain(*layers), 1)
    one_f_one_b, gpipe = (
        stage_memory(costs, 0, 1, stage_peak_points(schedule, micro_batches=3, num_later=2), recompute="never")
        for schedule in (ONE_FORWARD_ONE_BACKWARD, GPIPE)
    )
    # The second backward: one more waits with 10 + 6, the output and its gradient, and all gradients are there.
    assert one_f_one_b.total == 50 + 50 + 16 + 95 + 6 + 6
    assert gpipe == one_f_one_b
    # With a fourth micro-batch, forwards go on: two wait in the second backward.
    longer = stage_peak_points(ONE_FORWARD_ONE_BACKWARD, micro_batches=4, num_later=2)
    assert stage_memory(costs, 0, 1, longer, recompute="never").total == one_f_one_b.total + 16


# ---- sizes


@pytest.mark.parametrize("recompute", CHOICES)
def test_sizes_of_allocations_by_hand(recompute: Recompute) -> None:
    """The table is in `planner.core.cost.allocations`; the stage copies its input D and writes state J."""
    levels = {"forward": 200, "no_grad": 150, "first_backward": 300, "backward": 250}
    levels |= {"end_first": 300 + 30, "end_backward": 250 + 30}  # with the gradient of the output
    detail = record(internal=10, given=[tensor(100)], made=[tensor(30)], writes_input=True, **levels)
    layers = [layer("a", detail=record(given=[tensor(8)], made=[tensor(100)]))]
    layers += [layer("b", parameter_bytes=50, rewritten_bytes=9, detail=detail)]
    layers += [layer("c", detail=record(given=[tensor(30)], made=[tensor(4)]))]
    stages, _ = single_stage_memory_table(
        costs_at(chain(*layers), 1), 1, 2, micro_batches=3, recompute=recompute, recomputed=()
    )
    found = {
        name: size.total[0, -1]
        for name, size in stage_memory_by_allocation(stages, recompute, in_flight=3).sizes.items()
    }
    i, o, s, j, d = 100, 30, stages.saved[0, -1], 9, 100
    kept = {"held": i + s, "forward": i + d + 200, "first_backward": i + d + 300 + o, "backward": i + d + 250 + o}
    again = 200 + j
    dropped = {"held": i + o + j, "forward": i + j + d + 150}
    dropped |= {"first_backward": i + o + d + 300 + o, "backward": i + o + d + max(again, 250) + o}
    expected = kept if recompute == "never" else dropped
    last = dropped if recompute == "always" else kept
    assert {name: found[name] for name in kept} == expected
    assert (found["kept"], found["last_forward"], found["last_backward"]) == (
        last["held"],
        last["forward"],
        last["backward"],
    )


def test_memory_grows_with_micro_batches_under_gpipe_and_1f1b() -> None:
    for seed in range(6):
        costs = costs_at(random_profile(seed, 5, exact=True, sizes=(1, 4)), (1, 3, 4)[seed % 3])
        costs = replace(costs, bucket_bytes=200.0) if seed % 2 else costs
        for recompute in CHOICES:
            for schedule in (GPIPE, ONE_FORWARD_ONE_BACKWARD):
                every = [stage_peak_points(schedule, micro_batches=m, num_later=2) for m in (3, 4, 5, 9)]
                peaks = [stage_memory(costs, 1, 3, points, recompute=recompute).total for points in every]
                assert all(fewer <= more for fewer, more in pairwise(peaks))
