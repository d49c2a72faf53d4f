"""Profiles of several tensor-parallel widths: collectives, and valid requests."""

from dataclasses import replace
from typing import Any

import pytest

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.width import collectives_us, tensor_parallel_profile, usable_tensor_parallel_widths
from planner.core.errors import UsageError
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import judge
from planner.core.values.cluster import Link
from planner.core.values.profile import Profile, WidthCosts
from planner.solve import Request, solve
from tests.support.profiles import inputs_of, profile_of

LINK = Link(latency_us=3.0, bytes_per_s=100e6)


def profile(*widths: int, collective_bytes: int = 400) -> Profile:
    """Return four layers whose times shrink with the width."""
    made = {}
    for width in widths:
        alone = profile_of([80.0 / width] * 4, [160.0 / width] * 4, parameter_bytes=80 // width, output_bytes=100)
        sums = {"collective_bytes": (collective_bytes,), "collectives": 2} if collective_bytes and width > 1 else {}
        made[width] = tuple(replace(layer, **sums) for layer in alone.layers)
    first, *more = widths
    return replace(
        alone,
        tensor_parallel=first,
        layers=made[first],
        widths=tuple(WidthCosts(tensor_parallel=width, layers=made[width]) for width in more),
    )


def test_collective_times_by_hand() -> None:
    """A ring of n GPUs moves 2 (n-1)/n times the bytes; each sum has one latency."""
    assert collectives_us(1000, 2, 1, LINK) == 0
    assert collectives_us(1000, 2, 2, LINK) == 2 * 3 + 10
    assert collectives_us(1000, 2, 4, LINK) == 2 * 3 + 15
    assert collectives_us(1000, 2, 4, Link(latency_us=3.0)) == 2 * 3


def test_layer_times_include_collectives_once() -> None:
    """Both directions have them, weight gradients do not. A second conversion changes nothing."""
    wide = profile(1, 4)
    split = tuple(
        replace(layer, backward_input_us=(20.0,), backward_weight_us=(20.0,)) for layer in wide.widths[0].layers
    )
    wide = replace(wide, widths=(replace(wide.widths[0], layers=split),))
    cluster = inputs_of(8, 4, link=LINK).cluster_of_groups(4)
    plain = tensor_parallel_profile(wide, cluster)
    assert plain.layers[0].forward_us == (20 + 6 + 6,)
    assert plain.layers[0].backward_us == (40 + 6 + 6,)
    assert plain.layers[0].backward_input_us == (20 + 6 + 6,)
    assert plain.layers[0].backward_weight_us == (20,)
    assert tensor_parallel_profile(plain, cluster) is plain
    assert tensor_parallel_profile(profile(1), inputs_of(2, 4).cluster) == profile(1)


def test_device_speed_does_not_change_collective_times() -> None:
    inputs = replace(inputs_of(4, 4, link=LINK), tensor_parallel=4, schedule="gpipe")
    times = []
    for speed in (1.0, 2.0):
        plan = solve(profile(4), Request(inputs=replace(inputs, speeds=(speed,) * 4), micro_batches=4))
        times.append(Evaluation.of(plan, profile(4)).stage_times[0].forward_us)
    assert times == [4 * (20 + 12), 4 * (10 + 12)]


@pytest.mark.parametrize(
    ("asked", "widths", "usable"),
    [
        ({}, (1, 2, 4), (1, 2, 4)),
        ({"tensor_parallel": 2}, (1, 2, 4), (2,)),
        ({"node_devices": 2}, (1, 2, 4), (1, 2)),
        ({"devices": 3, "memory_bytes": (9,) * 3}, (1, 2, 4), (1, 2)),
        ({"memory_bytes": (9, 9, 9, 9, 9, 9, 9, 8)}, (1, 2, 4), (1,)),
        ({"speeds": (1.0,) * 7 + (2.0,)}, (1, 2, 4), (1,)),
        ({"links": (LINK,) * 7}, (1, 2, 4), (1,)),
    ],
)
def test_usable_widths_are_within_nodes_of_equal_devices(asked, widths, usable):
    assert usable_tensor_parallel_widths(profile(*widths), replace(inputs_of(8, 4, link=LINK), **asked)) == usable


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tensor_parallel": 8}, "the profile has no costs for 8 GPUs that share each layer"),
        ({"tensor_parallel": 4, "node_devices": 2}, "nodes of 2 GPUs do not hold whole groups of 4"),
        ({"tensor_parallel": 4, "devices": 3, "memory_bytes": (9,) * 3}, "3 GPUs cannot be a group of 4"),
        ({"tensor_parallel": 2, "speeds": (1.0,) * 7 + (2.0,)}, "groups of 2 need GPUs that are all alike"),
        ({"tensor_parallel": 2, "links": (LINK,) * 7}, "groups of 2 need `--link` and `--inter-link`"),
        ({"link": Link()}, "the link within a node is unknown"),
    ],
)
def test_impossible_widths_are_refused(asked: dict[str, Any], said: str) -> None:
    inputs = replace(inputs_of(8, 4, link=LINK), **asked)
    with pytest.raises(UsageError, match=said):
        solve(profile(1, 2, 4), Request(inputs=inputs))


def test_widths_without_collectives_need_no_link() -> None:
    """Measured times include their collectives."""
    assert usable_tensor_parallel_widths(profile(1, 2, collective_bytes=0), inputs_of(8, 4)) == (1, 2)


def test_check_uses_the_width_of_the_plan() -> None:
    """A profile without this width makes the plan stale."""
    inputs = replace(inputs_of(8, 4, link=LINK), schedule="gpipe", tensor_parallel=4)
    wide = profile(1, 2, 4)
    plan = solve(wide, Request(inputs=inputs))
    assert judge(plan, wide, profile_digest="sha256:0").plan == plan
    other = with_cuts(plan, wide, (1, 3))
    assert other.tensor_parallel == 4
    assert other.stages[1].forward_us == 3 * (20 + 12)
    with pytest.raises(UsageError, match="3 stages need 3 devices, there are 2"):
        with_cuts(plan, wide, (1, 1, 2))
    (*_, finding) = judge(plan, profile(1, 2), profile_digest="sha256:1").findings
    assert finding.code == "GP202"
    assert "in the plan, 4 GPUs share each layer" in finding.message
