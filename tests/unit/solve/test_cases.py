"""Requests that contradict themselves or the profile: refused before the search."""

import dataclasses
from typing import Any

import pytest

from planner.api.solving import solve as api_solve
from planner.core.errors import UsageError
from planner.core.values.cluster import Link
from planner.core.values.profile import Model
from planner.solve import Request, solve
from planner.solve.cases import cases_of, micro_batch_counts
from tests.support.chains import random_profile
from tests.support.profiles import inputs_of, profile_of


def test_more_devices_than_layers_are_refused() -> None:
    """The hint names the largest number of devices that works."""
    profile = profile_of([1.0] * 3)
    with pytest.raises(UsageError, match="4 devices for 3 layers") as refused:
        solve(profile, Request(inputs=inputs_of(4, 2)))
    assert "`--devices 3`" in refused.value.hint
    assert sum(solve(profile, Request(inputs=inputs_of(3, 2))).balance) == 3


@pytest.mark.parametrize("micro_batches", [5, 7, 13, 24, 0, -1])
def test_micro_batches_that_do_not_divide_the_batch_are_refused(micro_batches: int) -> None:
    with pytest.raises(UsageError, match=f"a batch of 12 cannot be split into {micro_batches} equal") as refused:
        solve(profile_of([1.0]), Request(inputs=inputs_of(1, 12), micro_batches=micro_batches))
    assert "1, 2, 3, 4, 6, 12" in refused.value.hint


def test_batch_without_a_profiled_micro_batch_size_is_refused() -> None:
    profile = random_profile(1, 3, sizes=(2, 4))
    with pytest.raises(UsageError, match="a batch of 7 gives micro-batches of 7, 1: none is within") as refused:
        solve(profile, Request(inputs=inputs_of(2, 7)))
    assert "2, 4" in refused.value.message
    for way_out in ("--batch", "--batch-sizes", "--extrapolate"):
        assert way_out in refused.value.hint
    assert solve(profile, Request(inputs=inputs_of(2, 7, extrapolate=True))).micro_batches in (1, 7)


def test_fixed_micro_batches_of_an_unprofiled_size_are_refused() -> None:
    with pytest.raises(UsageError, match="gives micro-batches of 1"):
        solve(random_profile(1, 3, sizes=(2, 4)), Request(inputs=inputs_of(2, 8), micro_batches=8))


@pytest.mark.parametrize(
    ("sizes", "batch", "extrapolate", "counts"),
    [
        ((1,), 6, False, (6,)),
        ((6,), 6, False, (1,)),
        ((1, 6), 6, False, (1, 2, 3, 6)),
        ((2, 4), 8, False, (2, 4)),
        ((2, 4), 8, True, (1, 2, 4, 8)),
        ((4, 2), 8, False, (2, 4)),
        ((3,), 6, True, (2,)),
        ((1, 1000), 1, False, (1,)),
    ],
)
def test_micro_batch_counts_are_divisors_with_profiled_sizes(sizes, batch, *, extrapolate, counts):
    profile = random_profile(1, 2, sizes=sizes)
    assert micro_batch_counts(profile, Request(inputs=inputs_of(1, batch, extrapolate=extrapolate))) == counts


def test_note_on_micro_batch_size_for_batch_normalization() -> None:
    """The note appears only if the batch is split."""
    profile = dataclasses.replace(random_profile(1, 2, sizes=(1, 16)), model=Model(batch_norm=True))
    notes: list[str] = []
    asked: dict[str, Any] = {"devices": 1, "mem": "8GB", "batch": 16, "note": notes.append}
    api_solve(profile, **asked, micro_batches=1)
    assert not notes
    api_solve(profile, **asked, micro_batches=4)
    assert ["micro-batches of 4 samples" in note for note in notes] == [True]


def test_min_micro_batch_limits_the_number_of_micro_batches() -> None:
    profile = random_profile(1, 2, sizes=(1, 16))
    asked = Request(inputs=dataclasses.replace(inputs_of(1, 16), min_micro_batch=4))
    assert micro_batch_counts(profile, asked) == (1, 2, 4)
    with pytest.raises(UsageError, match="micro-batches of at most 2 samples, but `--min-micro-batch 4`"):
        micro_batch_counts(profile, dataclasses.replace(asked, micro_batches=8))


def test_cuts_for_1f1b_differ_from_cuts_for_gpipe() -> None:
    """The best cuts under GPipe take 8 % longer under 1F1B."""
    profile = profile_of([30, 10, 10, 10], [20, 20, 20, 60])
    inputs = inputs_of(2, 32)
    one = solve(profile, Request(inputs=dataclasses.replace(inputs, schedule="1f1b")))
    assert (solve(profile, Request(inputs=inputs)).balance, one.balance) == ((3, 1), (2, 2))
    assert (one.schedule, one.solver.status, one.predicted.step_us) == ("1f1b", "optimal", 3280.0)


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"schedule": "interleaved", "chunks": 2}, {"solver": "milp"}, "`--solver milp` plans for the GPipe"),
        ({"recompute": "layers"}, {"solver": "milp"}, "`--solver milp` recomputes stage by stage"),
        ({"chunks": 2}, {}, "`gpipe` runs 1 stage on each device, got 2 chunks"),
        ({"chunks": 2, "schedule": "1f1b"}, {}, "`1f1b` runs 1 stage on each device, got 2 chunks"),
        ({"chunks": 3, "schedule": "interleaved"}, {}, "3 chunks on each of 2 devices or more: .* only 5 layers"),
        ({"speeds": (1.0,)}, {}, "1 speeds for 2 devices"),
        ({"speeds": (1.0,) * 3}, {}, "3 speeds for 2 devices"),
        ({"replicas": 2, "speeds": (1.0, 2.0)}, {}, "replicas .* equal devices"),
        ({"replicas": 0, "memory_bytes": (1, 2)}, {}, "replicas .* equal devices"),
        ({"replicas": 3}, {}, "3 replicas need at least as many devices, there are 2"),
        ({"replicas": 2, "batch": 5}, {}, "a batch of 5 cannot be shared equally by 2 replicas"),
        ({"replicas": 2}, {"micro_batches": 4}, "a batch of 2 cannot be split into 4 equal micro-batches"),
        ({"together": (("layers.1", "head"),)}, {}, '`--together` names the layer "head"'),
        ({"apart": (("tail", "layers.1"),)}, {}, '`--apart` names the layer "tail"'),
        ({"replicas": 0}, {"micro_batches": 3}, "a batch of 4 cannot be split into 3 equal micro-batches"),
        ({}, {"balance": (2, 2)}, "adds up to 4 layers, the profile has 5"),
        ({}, {"balance": (3, 3)}, "adds up to 6 layers, the profile has 5"),
        *(({}, {"balance": balance}, "at least one layer") for balance in ((5, 0), (6, -1), ())),
        ({}, {"balance": (1, 1, 3)}, "3 stages need 3 devices, there are 2"),
        ({"batch": 0}, {}, "0"),
        ({"batch": -4}, {}, "-4"),
        # Not numbers of anything, or not as many memory limits as devices: any message will do.
        *(({"memory_bytes": (10**9,) * count}, {}, ".") for count in (0, 1, 3)),
        ({"devices": 0, "memory_bytes": ()}, {}, "."),
        *(({"speeds": (1.0, speed)}, {}, "^(?!.*batch of -)") for speed in (0.0, -1.0)),
        ({"replicas": -1}, {}, "^(?!.*batch of -)"),
        ({"schedule": "interleaved", "chunks": -1}, {}, "^(?!.*batch of -)"),
    ],
)
def test_contradicting_options_are_refused(changes: dict[str, Any], options: dict[str, Any], said: str) -> None:
    inputs = dataclasses.replace(inputs_of(2, 4), **changes)
    with pytest.raises(UsageError, match=said):
        solve(profile_of([1.0] * 5), Request(inputs=inputs, **options))


def test_empty_groups_of_layers_have_no_effect() -> None:
    inputs = dataclasses.replace(inputs_of(2, 4), together=((),), apart=((),))
    assert solve(profile_of([1.0] * 5), Request(inputs=inputs)).balance in ((2, 3), (3, 2))


def test_replicas_allow_more_devices_than_layers() -> None:
    profile = profile_of([1.0] * 3)
    for replicas in (0, 2, 4):
        plan = solve(profile, Request(inputs=dataclasses.replace(inputs_of(4, 4), replicas=replicas)))
        assert plan.replicas * plan.num_devices <= 4
        assert plan.replicas > 1


def test_fixed_micro_batches_leave_the_replicas_open() -> None:
    """Size 1 is profiled, so batch 2 with M = 1 needs two replicas."""
    inputs = dataclasses.replace(inputs_of(2, 2), replicas=0)
    plan = solve(profile_of([1.0] * 3), Request(inputs=inputs, micro_batches=1))
    assert (plan.replicas, plan.micro_batches, plan.micro_batch_size) == (2, 1, 1)


def test_sizes_between_profiled_ones_are_used() -> None:
    profile = random_profile(2, 4, sizes=(1, 4))
    plan = solve(profile, Request(inputs=inputs_of(2, 6)))
    assert plan.micro_batch_size in (1, 2, 3)
    forced = solve(profile, Request(inputs=inputs_of(2, 6), micro_batches=2))
    assert (forced.micro_batches, forced.micro_batch_size) == (2, 3)


def test_plan_records_extrapolation() -> None:
    """`check` then extrapolates too."""
    profile = random_profile(2, 4, sizes=(2, 4))
    plan = solve(profile, Request(inputs=inputs_of(2, 8, extrapolate=True), micro_batches=1))
    assert plan.micro_batch_size == 8
    assert plan.inputs.extrapolate is True


def test_too_few_links_are_refused_with_the_command_to_measure_them() -> None:
    inputs = dataclasses.replace(inputs_of(4, 4), links=(Link(), Link()))
    with pytest.raises(UsageError, match="2 links between neighbors for 4 devices: 3 are needed") as refused:
        solve(profile_of([1.0] * 5), Request(inputs=inputs))
    assert "torchrun --nproc-per-node 4 -m planner profile-links" in refused.value.hint


def test_list_of_equal_links_gives_the_plan_of_one_link() -> None:
    profile = profile_of([10.0] * 6, [20.0] * 6, output_bytes=100)
    link = Link(latency_us=3.0, bytes_per_s=1e8)
    inputs = inputs_of(3, 6, link=link)
    one = solve(profile, Request(inputs=inputs))
    each = solve(profile, Request(inputs=dataclasses.replace(inputs, link=Link(), links=(link,) * 2)))
    assert dataclasses.replace(each, inputs=one.inputs) == one


def test_slow_link_gets_the_smallest_transfer() -> None:
    profile = profile_of([1e4] * 6, [1e4] * 6)
    sizes = [1000 if n == 3 else 4_000_000 for n in range(6)]
    layers = tuple(dataclasses.replace(x, output_bytes=(s,)) for x, s in zip(profile.layers, sizes, strict=True))
    profile = dataclasses.replace(profile, layers=layers)
    fast, slow = Link(bytes_per_s=1e12), Link(bytes_per_s=1e7)
    for links, boundary in (((fast, slow), 1), ((slow, fast), 0)):
        plan = solve(profile, Request(inputs=dataclasses.replace(inputs_of(3, 8), links=links)))
        assert sum(plan.balance[: boundary + 1]) == 4


def test_zero_bubble_schedules_are_refused_for_compiled_profiles() -> None:
    """Compiled executables run whole backwards."""
    profile = profile_of([1.0] * 4, [2.0] * 4)
    compiled = dataclasses.replace(profile, device=dataclasses.replace(profile.device, kind="tpu:v2", how="compiled"))
    asked = dataclasses.replace(inputs_of(2, 4), schedule="zb-h1")
    with pytest.raises(UsageError, match=r"`zb-h1` splits the backward, .*`tpu:v2`") as refused:
        solve(compiled, Request(inputs=asked, micro_batches=4))
    assert "--schedule gpipe" in refused.value.hint
    assert solve(profile, Request(inputs=asked, micro_batches=4)).schedule == "zb-h1"
    assert solve(compiled, Request(inputs=dataclasses.replace(asked, schedule="auto"), micro_batches=4)).balance


def test_interleaved_includes_one_chunk_per_device() -> None:
    """An answer over all numbers of chunks is then never slower than the answer for one chunk."""
    profile, request = random_profile(1, 8), Request(inputs=inputs_of(2, 4, extrapolate=True), micro_batches=4)
    for schedule in ("interleaved", "interleaved-zb"):
        inputs = dataclasses.replace(request.inputs, schedule=schedule, chunks=0)
        cases = cases_of(profile, dataclasses.replace(request, inputs=inputs))
        assert sorted({case.chunks for case in cases}) == [1, 2, 3, 4]
