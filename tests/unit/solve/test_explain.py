"""Errors and hints of infeasible requests: every suggestion works."""

import dataclasses
import random
import re
from itertools import pairwise
from typing import Any

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.errors import InfeasibleError, NoPlanFoundError, UsageError
from planner.core.judge.verdict import judge
from planner.core.values.plan import Inputs, RecomputePolicy, ScheduleName
from planner.core.values.profile import Profile
from planner.core.values.units import parse_bytes
from planner.solve import Request, explain, solve
from planner.solve.cases import cases_of
from planner.solve.explain import smallest_limit_bytes
from planner.solve.space.case import Case
from planner.solve.space.partitions import Evaluator
from tests.support.chains import chain, layer, random_profile
from tests.support.profiles import UNLIMITED, inputs_of, profile_of

MEM = re.compile(r"with (\d+) devices? the smallest `--mem` is ([0-9.]+\w+) \(M = (\d+)\)")
DEVICES = re.compile(r"`--devices (\d+)` fits in .* \(M = (\d+)\)")
FITS_M = re.compile(r"M = (\d+) fits")


def infeasible(profile: Profile, request: Request) -> InfeasibleError:
    """Return the error of a problem without a plan."""
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, request)
    assert raised.value.exit_code == 1
    return raised.value


def feasible(profile: Profile, request: Request) -> bool:
    """Return True if there is a plan."""
    try:
        solve(profile, request)
    except InfeasibleError:
        return False
    return True


def with_limit(request: Request, limit: int) -> Request:
    """Return the request with another memory limit on every device."""
    inputs = request.inputs
    return dataclasses.replace(
        request, inputs=dataclasses.replace(inputs, memory_bytes=(limit,) * len(inputs.memory_bytes))
    )


def with_inputs(request: Request, **changes: Any) -> Request:
    """Return the request with other inputs."""
    return dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, **changes))


def inputs_with(devices: int, batch: int, memory_bytes: int = UNLIMITED, **changes: Any) -> Inputs:
    """Return inputs with more options than `inputs_of` has."""
    return dataclasses.replace(inputs_of(devices, batch, memory_bytes=memory_bytes), **changes)


def gigabytes() -> Profile:
    """Return a realistic chain: gigabytes of parameters and activations, at two sizes."""
    layers = [
        layer(
            f"h.{n}",
            parameter_bytes=123_456_789 * (1 + n % 3),
            optimizer_bytes=246_913_578,
            forward_us=(10.0, 20.0),
            backward_us=(20.0, 40.0),
            output_bytes=(4_194_304, 8_388_608),
            saved_bytes=(87_654_321, 175_308_642),
            forward_peak_bytes=(1_000_000, 2_000_000),
            backward_peak_bytes=(3_000_000, 6_000_000),
        )
        for n in range(10)
    ]
    return chain(*layers, sizes=(1, 2))


@pytest.mark.parametrize("recompute", ["auto", "never", "except-last", "always"])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("reserve", [0, 300_000_000])
def test_suggested_limit_fits_and_one_percent_less_does_not(recompute, devices, reserve):
    inputs = dataclasses.replace(inputs_of(devices, 8, memory_bytes=1000, reserve_bytes=reserve), recompute=recompute)
    request = Request(inputs=inputs)
    named = MEM.search(infeasible(gigabytes(), request).hint)
    limit = parse_bytes(named[2])
    assert int(named[1]) == devices
    assert limit > 10**8 + reserve
    assert feasible(gigabytes(), with_limit(request, limit))
    assert not feasible(gigabytes(), with_limit(request, int(limit * 0.99)))
    # The M that it names is one that fits there.
    assert feasible(gigabytes(), dataclasses.replace(with_limit(request, limit), micro_batches=int(named[3])))


@pytest.mark.parametrize("needed", [999, 1000, 9_999, 123_456, 10**9 + 1, 12_345_123_456_789, 2_345_678_901_234_567])
def test_suggested_limit_is_rounded_up(needed: int) -> None:
    profile = chain(layer("a", parameter_bytes=needed, gradient_bytes=0))
    request = Request(inputs=inputs_of(1, 1, memory_bytes=1))
    named = MEM.search(infeasible(profile, request).hint)
    assert needed <= parse_bytes(named[2]) <= needed * 1.01 + 10
    assert feasible(profile, with_limit(request, parse_bytes(named[2])))


def test_no_number_of_devices_is_suggested_if_none_helps() -> None:
    profile = chain(layer("small", parameter_bytes=1), layer("large", parameter_bytes=1000))
    assert "--devices" not in infeasible(profile, Request(inputs=inputs_of(1, 1, memory_bytes=500))).hint


def test_error_names_a_layer_that_does_not_fit_alone() -> None:
    profile = chain(
        layer("h.0", parameter_bytes=100),
        layer("lm_head", parameter_bytes=1_000_000, saved_bytes=48_576),
        layer("h.1", parameter_bytes=200),
    )
    error = infeasible(profile, Request(inputs=inputs_of(2, 1, memory_bytes=1_048_576)))
    # 1,000,000 of parameters, as much of gradients, 48,576 saved.
    assert 'layer "lm_head" alone needs 1.95 MiB with M = 1, 977 KiB over' in error.message
    assert "no plan fits 1.00 MiB on each of 2 devices" in error.message


def test_error_reports_layers_that_fit_alone_but_not_together() -> None:
    profile = profile_of([1.0] * 6, parameter_bytes=100)  # 200 bytes each with gradients
    error = infeasible(profile, Request(inputs=inputs_of(2, 1, memory_bytes=500)))
    assert "every layer fits alone, but 2 stages cannot hold them all" in error.message
    assert "the evenest cut needs 600 B with M = 1, 100 B over" in error.message
    assert "the smallest `--mem` is 600B" in error.hint
    assert "`--devices 3` fits" in error.hint


def test_schedules_are_suggested_for_all_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()

    def evaluator(case: Case, num_devices: int) -> Evaluator:
        counts.append(num_devices)
        return Evaluator(case, num_devices)

    monkeypatch.setattr(explain, "Evaluator", evaluator)
    split = {"backward_input_us": (1.0,), "backward_weight_us": (1.0,), "weight_held_bytes": (500,)}
    profile = chain(*(layer(parameter_bytes=1000, saved_bytes=1000, backward_us=2.0, **split) for _ in range(32)))
    infeasible(profile, Request(inputs=inputs_with(8, 8, 9_500, schedule="1f1b", recompute="never"), micro_batches=8))
    assert set(counts) == {8, 4}  # DualPipeV needs two micro-batches per device


@pytest.mark.parametrize("schedule", ["gpipe", "auto"])
def test_state_that_exceeds_the_memory_of_all_devices_proves_that_nothing_fits(schedule: ScheduleName) -> None:
    profile = profile_of([1.0] * 6, parameter_bytes=100)
    inputs = dataclasses.replace(inputs_of(2, 2, memory_bytes=310, reserve_bytes=11), schedule=schedule)
    error = infeasible(profile, Request(inputs=inputs))
    assert error.message.endswith("parameters and optimizer state alone take 600 B, 2 devices together have 598 B")


def test_shared_parameters_count_once_in_the_state() -> None:
    tied = {"parameter_bytes": 100, "gradient_bytes": 0, "tied_bytes": 100}
    profile = chain(layer("a", tied=("b.weight",), **tied), layer("b", tied=("a.weight",), **tied))
    assert feasible(profile, Request(inputs=inputs_of(1, 1, memory_bytes=150)))


@pytest.mark.parametrize(("micro_batches", "limit", "named"), [(1, 2500, 2), (2, 1500, 4), (1, 700, 8)])
def test_smallest_m_that_fits_is_suggested(micro_batches: int, limit: int, named: int) -> None:
    sizes = (1, 2, 4, 8)
    profile = chain(
        layer(
            "a",
            forward_us=tuple(map(float, sizes)),
            backward_us=tuple(map(float, sizes)),
            output_bytes=(0,) * 4,
            saved_bytes=tuple(10 * s for s in sizes),
            forward_peak_bytes=tuple(600 * s for s in sizes),
            backward_peak_bytes=tuple(300 * s for s in sizes),
        ),
        sizes=sizes,
    )
    request = Request(inputs=inputs_of(1, 8, memory_bytes=limit), micro_batches=micro_batches)
    said = FITS_M.search(infeasible(profile, request).hint)
    assert int(said[1]) == named
    fits = {m: feasible(profile, dataclasses.replace(request, micro_batches=m)) for m in (1, 2, 4, 8)}
    assert next(m for m in fits if fits[m]) == named


def test_recomputation_is_not_suggested_if_already_allowed() -> None:
    policies: tuple[RecomputePolicy, ...] = ("auto", "always")
    for policy in policies:
        inputs = dataclasses.replace(inputs_of(2, 4, memory_bytes=5), recompute=policy)
        assert "--recompute" not in infeasible(random_profile(1, 4), Request(inputs=inputs)).hint


# ---- unequal limits


def uneven(**options: Any) -> Inputs:
    """Return inputs with two devices of 500 and 50 bytes."""
    return dataclasses.replace(inputs_of(2, 4, memory_bytes=(500, 50)), **options)


def test_error_lists_unequal_memory_limits() -> None:
    profile = profile_of([1.0] * 2, parameter_bytes=10_000)
    error = infeasible(profile, Request(inputs=uneven()))
    assert "no plan fits the memory limits 500 B, 50 B" in error.message
    assert 'layer "layers.0" alone needs' in error.message


def test_reported_excess_is_positive() -> None:
    """Both layers fit on devices of 500 bytes, but the second device has 50."""
    profile = profile_of([1.0] * 2, parameter_bytes=200)  # 400 bytes each with gradients
    error = infeasible(profile, Request(inputs=uneven()))
    assert re.search(r"-\d", error.message) is None
    assert re.search(r"[1-9]\d* B over", error.message)


def test_suggestions_consider_unequal_memory_limits() -> None:
    """`--recompute auto` fits two devices of 150 bytes, but not 150 and 10."""
    profile = profile_of([1.0] * 2, saved_bytes=100)
    inputs = dataclasses.replace(uneven(recompute="never"), memory_bytes=(150, 10))
    assert not feasible(profile, Request(inputs=dataclasses.replace(inputs, recompute="auto")))
    assert feasible(profile, Request(inputs=dataclasses.replace(inputs, recompute="auto", memory_bytes=(150, 150))))
    assert "--recompute" not in infeasible(profile, Request(inputs=inputs)).hint


# ---- given cuts


def test_error_reports_the_stage_of_given_cuts_that_does_not_fit() -> None:
    """Other cuts (2 + 2) would fit."""
    profile = profile_of([1.0] * 4, parameter_bytes=200)  # 400 bytes each with gradients
    request = Request(inputs=inputs_of(2, 1, memory_bytes=1000), balance=(1, 3))
    error = infeasible(profile, request)
    assert re.search(r"-\d", error.message) is None
    assert "1.17 KiB" in error.message or "1200 B" in error.message
    assert "200 B over" in error.message


def test_suggestions_for_given_cuts_keep_the_cuts() -> None:
    profile = profile_of([1.0] * 4, parameter_bytes=200)
    request = Request(inputs=inputs_of(2, 1, memory_bytes=1000), balance=(1, 3))
    for named in re.findall(r"smallest `--mem` is ([0-9.]+\w+)", infeasible(profile, request).hint):
        assert feasible(profile, with_limit(request, parse_bytes(named)))
    for count in re.findall(r"`--devices (\d+)` fits", infeasible(profile, request).hint):
        assert feasible(profile, with_inputs(request, devices=int(count), memory_bytes=(1000,) * int(count)))


@pytest.mark.parametrize(
    ("balance", "inputs"),
    [
        ((2, 2, 2), inputs_with(3, 4, memory_bytes=1500, schedule="1f1b")),
        ((2, 2, 1, 1), inputs_with(2, 4, memory_bytes=1500, schedule="interleaved", chunks=2)),
        ((2, 2, 1, 1), inputs_with(2, 4, memory_bytes=2300, schedule="interleaved", chunks=2)),
        ((2, 2, 2), inputs_with(6, 4, memory_bytes=1500, replicas=2)),
    ],
    ids=["1f1b", "interleaved", "interleaved-looser", "replicas"],
)
def test_excess_of_given_cuts_is_positive_under_every_schedule(balance: tuple[int, ...], inputs: Inputs) -> None:
    error = infeasible(random_profile(1, 6), Request(inputs=inputs, balance=balance))
    assert re.search(r"-\d|inf|nan", error.message) is None, error.message


@pytest.mark.parametrize(
    ("balance", "inputs"),
    [
        ((2, 2, 2), inputs_with(3, 2, schedule="1f1b")),
        ((2, 2, 2), inputs_with(4, 4, replicas=2)),
        ((2, 2, 2), inputs_with(2, 4, schedule="interleaved", chunks=2)),
    ],
    ids=["1f1b with fewer micro-batches than stages", "more stages than a replica has devices", "odd chunks"],
)
def test_given_cuts_that_cannot_run_are_not_blamed_on_memory(balance: tuple[int, ...], inputs: Inputs) -> None:
    with pytest.raises((InfeasibleError, UsageError)) as refused:
        solve(random_profile(1, 6), Request(inputs=inputs, balance=balance))
    assert re.search(r" over\b|TiB", refused.value.message) is None, refused.value.message


def test_contradicting_placement_rules_are_not_blamed_on_memory() -> None:
    inputs = dataclasses.replace(
        inputs_of(2, 2), together=(("layers.1", "layers.2"),), apart=(("layers.1", "layers.2"),)
    )
    with pytest.raises((InfeasibleError, UsageError)) as refused:
        solve(random_profile(1, 6), Request(inputs=inputs))
    assert "TiB" not in refused.value.message


# ---- interleaved


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 6))]


def fitting_interleaved(seed: int) -> tuple[Profile, Inputs, Partition]:
    """Return a chain with too many plans to try all, and a plan that fits three devices exactly."""
    profile = random_profile(seed, 14)
    inputs = inputs_with(3, 6, schedule="interleaved", chunks=2)
    costs, rng, tried = costs_at(profile, 1), random.Random(seed), []
    for _ in range(300):
        cuts = [0, *sorted(rng.sample(range(1, 14), 5)), 14]
        partition = Partition(
            schedule="interleaved",
            micro_batches=6,
            balance=tuple(b - a for a, b in pairwise(cuts)),
            recompute=("always",) * 6,
            chunks=2,
        )
        stages = Evaluation(costs, partition, inputs.cluster).stages
        tried.append((max(sum(s.memory.total for s in stages[d::3]) for d in range(3)), partition.balance, partition))
    peak, _, partition = min(tried, key=lambda one: one[:2])
    return profile, dataclasses.replace(inputs, memory_bytes=(peak,) * 3), partition


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_given_interleaved_cuts_that_fit_are_planned(seed: int) -> None:
    profile, inputs, partition = fitting_interleaved(seed)
    plan = solve(profile, Request(inputs=inputs, micro_batches=6, balance=partition.balance))
    assert judge(plan, profile, profile_digest=inputs.profile.digest).fits


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_interleaved_is_infeasible_only_if_proven(seed: int) -> None:
    """A plan fits, but there are too many to try all of them."""
    profile, inputs, _ = fitting_interleaved(seed)
    try:
        plan = solve(profile, Request(inputs=inputs))
    except NoPlanFoundError:
        return
    assert judge(plan, profile, profile_digest=inputs.profile.digest).fits


# ---- Arithmetic of memory limits


CASES: tuple[tuple[ScheduleName, int], ...] = (("gpipe", 0), ("gpipe", 70), ("1f1b", 0))


@pytest.mark.slow
def test_smallest_limit_is_that_of_the_best_cut() -> None:
    for seed in range(6):
        profile = random_profile(seed, 6, exact=seed % 2 == 0)
        for devices in (1, 2, 3):
            for schedule, reserve in CASES:
                inputs = dataclasses.replace(inputs_of(devices, 3, reserve_bytes=reserve), schedule=schedule)
                (case,) = cases_of(profile, Request(inputs=inputs, micro_batches=3))
                limit = smallest_limit_bytes(case)
                request = with_limit(Request(inputs=inputs, micro_batches=3), int(limit))
                assert limit == int(limit)
                assert feasible(profile, request)
                assert not feasible(profile, with_limit(request, int(limit) - 1))


@pytest.mark.parametrize("optimizer", ["adamw", "build_optimizer"])
def test_a_hint_says_that_another_optimizer_replaces_the_one_of_the_model_file(optimizer: str) -> None:
    profile = dataclasses.replace(chain(layer("a", parameter_bytes=100, optimizer_bytes=1000)), optimizer=optimizer)
    hint = infeasible(profile, Request(inputs=inputs_of(1, 1, memory_bytes=400))).hint
    assert "a plan fits: profile with `--optimizer" in hint
    assert hint.endswith("(replaces `build_optimizer`)") == (optimizer == "build_optimizer")
