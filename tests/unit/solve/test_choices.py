"""What the solver chooses, on chains where a simpler rule chooses worse; and that it chooses the same every time."""

import dataclasses
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.judge.verdict import judge
from planner.core.values.cluster import Link
from planner.core.values.profile import Profile
from planner.files import dump
from planner.solve import Request, solve
from tests.support.brute_force import best_step_us, partitions
from tests.support.chains import chain, layer, random_profile
from tests.support.clocks import cpu_seconds
from tests.support.profiles import inputs_of, profile_of


def never_recomputed(balance: tuple[int, ...], micro_batches: int) -> Partition:
    """Stages under GPipe."""
    recompute = ("never",) * len(balance)
    return Partition(schedule="gpipe", micro_batches=micro_batches, balance=balance, recompute=recompute)


def fixed_cost_chain(fixed_us: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> Profile:
    """16 equal layers: 100 us per sample and, whatever the size, `fixed_us` per micro-batch."""
    layers = [
        layer(
            f"h.{n}",
            forward_us=tuple(fixed_us + 100.0 * s for s in sizes),
            backward_us=tuple(fixed_us + 200.0 * s for s in sizes),
            output_bytes=(0,) * len(sizes),
            saved_bytes=(0,) * len(sizes),
        )
        for n in range(16)
    ]
    return chain(*layers, sizes=sizes)


def step_with(profile: Profile, micro_batches: int | None) -> Any:
    """The plan for four devices and 32 samples, with M given or chosen."""
    return solve(profile, Request(inputs=inputs_of(4, 32), micro_batches=micro_batches))


@pytest.mark.parametrize(("fixed_us", "lost"), [(100.0, 1.1), (500.0, 1.5), (2000.0, 2.5)])
def test_the_largest_number_of_micro_batches_is_not_the_best(fixed_us: float, lost: float) -> None:
    """With a fixed cost per layer and micro-batch, the ideal bubble's advice (largest M) is costly (findings 1.4)."""
    profile = fixed_cost_chain(fixed_us)
    chosen = step_with(profile, None)
    all_steps = {m: step_with(profile, m).predicted.step_us for m in (1, 2, 4, 8, 16, 32)}
    assert chosen.predicted.step_us == min(all_steps.values())
    assert chosen.micro_batches == min(all_steps, key=lambda m: all_steps[m])
    assert chosen.micro_batches < 32
    assert all_steps[32] > lost * chosen.predicted.step_us
    assert all_steps[1] > chosen.predicted.step_us


def test_without_fixed_cost_the_largest_number_of_micro_batches_is_the_best() -> None:
    """Then only the bubble is left to shrink."""
    assert step_with(fixed_cost_chain(0.0), None).micro_batches == 32


def test_a_frozen_backbone_is_not_cut_by_forward_plus_backward() -> None:
    """12 layers with forward alone, 4 with backward too: min-max of F+B cuts 12 | 4, more than 1.1 times slower."""
    profile = profile_of([1.0] * 16, [0.0] * 12 + [2.0] * 4)
    inputs = inputs_of(2, 64)
    plan = solve(profile, Request(inputs=inputs))
    costs, cluster = costs_at(profile, 1), inputs.cluster

    def time(balance: tuple[int, ...]) -> float:
        return Evaluation(costs, never_recomputed(balance, 64), cluster).step_us

    both = [f + b for f, b in zip(costs.forward_us, costs.backward_us, strict=True)]
    min_max = min(((n, 16 - n) for n in range(1, 16)), key=lambda b: max(sum(both[: b[0]]), sum(both[b[0] :])))
    assert min_max == (12, 4)
    assert time(min_max) > 1.1 * plan.predicted.step_us
    assert plan.predicted.step_us == min(time((n, 16 - n)) for n in range(1, 16))


def test_fewer_stages_are_taken_when_links_are_slow() -> None:
    """A cut that costs more than it saves is not made, though four devices are there; fast links use all four."""
    profile = profile_of([10.0] * 8, [20.0] * 8, output_bytes=1000)
    fast, slow, slowest = (
        solve(profile, Request(inputs=inputs_of(4, 16, link=link, recompute="never")))
        for link in (Link(bytes_per_s=1e9), Link(latency_us=150.0), Link(latency_us=10_000.0))
    )
    assert len(fast.balance) == 4
    assert len(slow.balance) < 4
    assert slowest.balance == (8,)
    assert slowest.predicted.step_us == 16 * 8 * 30
    assert best_step_us(profile, slow.inputs) == pytest.approx(slow.predicted.step_us, rel=1e-12)


def test_a_cut_avoids_the_wide_boundary() -> None:
    """The even cut crosses 1 MB over a slow link, its neighbours 1 kB: one of those is taken."""
    layers = [
        layer(str(n), forward_us=10.0, backward_us=20.0, output_bytes=10**6 if n == 3 else 1000) for n in range(8)
    ]
    plan = solve(chain(*layers), Request(inputs=inputs_of(2, 16, link=Link(bytes_per_s=1e9))))
    assert plan.balance in ((3, 5), (5, 3))
    even = solve(chain(*layers), Request(inputs=inputs_of(2, 16, link=Link(bytes_per_s=1e9)), balance=(4, 4)))
    assert even.predicted.step_us > plan.predicted.step_us


def recompute_chain() -> Profile:
    """The first two layers save 1000 bytes per micro-batch, the last two 10; times equal."""
    return chain(
        *(
            layer(str(n), forward_us=10.0, backward_us=20.0, output_bytes=1, saved_bytes=1000 if n < 2 else 10)
            for n in range(4)
        )
    )


def test_recomputation_is_chosen_stage_by_stage() -> None:
    """Only the stage that does not fit pays for it, which is faster than recomputing everywhere."""
    plan = solve(recompute_chain(), Request(inputs=inputs_of(2, 8, memory_bytes=5000)))
    assert [stage.recompute for stage in plan.stages] == ["except-last", "never"]
    everywhere = solve(recompute_chain(), Request(inputs=inputs_of(2, 8, memory_bytes=5000, recompute="always")))
    assert {stage.recompute for stage in everywhere.stages} == {"always"}
    assert plan.predicted.step_us < everywhere.predicted.step_us
    assert plan.predicted.recompute_share > 0


def test_nothing_is_recomputed_where_everything_fits() -> None:
    """`auto` is not a wish to recompute."""
    plan = solve(recompute_chain(), Request(inputs=inputs_of(2, 8)))
    assert {stage.recompute for stage in plan.stages} == {"never"}
    assert plan.predicted.recompute_share == 0


def test_the_cheapest_recomputation_that_fits_is_taken() -> None:
    """As the cap falls: never, then all but the last, then always. Each is judged again and fits."""
    chosen = []
    for cap in (8 * 1000, 3000, 1050):
        inputs = inputs_of(1, 8, memory_bytes=cap)
        profile = chain(layer("a", forward_us=10.0, backward_us=20.0, output_bytes=1, saved_bytes=1000))
        plan = solve(profile, Request(inputs=inputs))
        chosen.append(plan.stages[0].recompute)
        assert plan.stages[0].memory.total <= cap
        assert judge(plan, profile, profile_digest=inputs.profile.digest).fits
    assert chosen == ["never", "except-last", "always"]


def test_unequal_caps_move_the_cut() -> None:
    """The device with little memory gets few layers, wherever it stands; no stage exceeds its own cap."""
    profile = profile_of([10.0] * 8, [20.0] * 8, parameter_bytes=100)
    cuts = []
    for caps in ((400, 10_000, 10_000), (10_000, 400, 10_000), (10_000, 10_000, 400)):
        plan = solve(profile, Request(inputs=inputs_of(3, 16, memory_bytes=caps)))
        assert tuple(stage.memory_bytes for stage in plan.stages) == caps
        assert all(stage.memory.total <= stage.memory_bytes for stage in plan.stages)
        cuts.append(plan.balance)
    assert cuts == [(2, 3, 3), (3, 2, 3), (3, 3, 2)]


def test_unequal_caps_equal_brute_force() -> None:
    """On 12 chains with caps between far too small and plenty, free or blocking links."""
    feasible = 0
    for seed in range(12):
        profile = random_profile(seed, 5)
        caps = ((1000, 2600, 1600), (3000, 800, 4000), (2000, 2000, 2001))[seed % 3]
        link = Link(latency_us=2.0, bytes_per_s=1e7, blocking=seed % 2 == 0)
        inputs = inputs_of(3, 2, memory_bytes=caps, link=link)
        best = best_step_us(profile, inputs)
        if best is None:
            continue
        feasible += 1
        plan = solve(profile, Request(inputs=inputs))
        assert plan.predicted.step_us == pytest.approx(best, rel=1e-12)
    assert feasible >= 6


def test_the_optimizers_step_of_the_first_stage_counts() -> None:
    """The even cut would put a long optimizer step into stage 0, where nothing hides it: the uneven one is faster.

    Behind stage 0, its backward and forward (10 + 10) hide a part of the step.
    """
    profile = chain(
        layer("a", forward_us=10.0, backward_us=10.0),
        layer("b", forward_us=10.0, backward_us=10.0, optimizer_us=150.0),
        layer("c", forward_us=20.0, backward_us=20.0),
    )
    uneven = solve(profile, Request(inputs=inputs_of(2, 1), balance=(1, 2)))
    even = solve(profile, Request(inputs=inputs_of(2, 1), balance=(2, 1)))
    assert uneven.predicted.step_us == 80 + 150 - 20
    assert even.predicted.step_us == 80 + 150
    assert solve(profile, Request(inputs=inputs_of(2, 1))).balance == (1, 2)


@pytest.mark.parametrize("seed", [0, 11, 51, 89, 191, 196, 259, 347, 521, 547, 624, 1544, 1595, 1604])
def test_the_search_finds_what_moving_single_cuts_does_not(seed: int) -> None:
    """Chains on which local moves, or one label per cut, end up to 4 % above the optimum: against all 232 cuts."""
    rng = random.Random(seed)
    forward = [rng.uniform(1, 20) for _ in range(12)]
    profile = profile_of(forward, [f * rng.uniform(0.2, 5) for f in forward])
    inputs = inputs_of(4, 8, recompute="never")
    costs, cluster = costs_at(profile, 1), inputs.cluster
    times = [Evaluation(costs, never_recomputed(b, 8), cluster).step_us for b in partitions(12, 4)]
    assert len(times) == 232
    assert solve(profile, Request(inputs=inputs)).predicted.step_us == pytest.approx(min(times), rel=1e-12)


def test_a_given_balance_is_evaluated_not_searched() -> None:
    """Status `given`, without certificate; M and recomputation are still chosen."""
    profile = fixed_cost_chain(500.0)
    free = solve(profile, Request(inputs=inputs_of(4, 32)))
    given = solve(profile, Request(inputs=inputs_of(4, 32), balance=(1, 5, 5, 5)))
    assert given.balance == (1, 5, 5, 5)
    assert (given.solver.method, given.solver.status) == ("given", "given")
    assert (given.solver.gap, given.solver.lower_bound_us) == (0.0, 0.0)
    assert given.predicted.step_us > free.predicted.step_us
    steps = {
        m: solve(profile, Request(inputs=inputs_of(4, 32), balance=(1, 5, 5, 5), micro_batches=m)).predicted.step_us
        for m in (1, 2, 4, 8, 16, 32)
    }
    assert given.micro_batches == min(steps, key=lambda m: steps[m])
    tight = solve(recompute_chain(), Request(inputs=inputs_of(2, 8, memory_bytes=5000), balance=(2, 2)))
    assert tight.solver.status == "given"
    assert [stage.recompute for stage in tight.stages] == ["except-last", "never"]


def test_a_given_balance_may_leave_devices_idle() -> None:
    """Two stages on four devices, if that is what was asked; also with unequal caps."""
    profile = profile_of([10.0] * 6)
    for caps in (10**9, (10**9, 10**8, 10**7, 10**6)):
        plan = solve(profile, Request(inputs=inputs_of(4, 2, memory_bytes=caps), balance=(3, 3)))
        assert plan.balance == (3, 3)
        assert len(plan.stages) == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_certificate_is_true(seed: int) -> None:
    """`optimal` with gap 0 and the bound at the step time; no partition of any stage count is faster."""
    profile = random_profile(seed, 7)
    inputs = inputs_of(3, 4, link=Link(latency_us=1.0, bytes_per_s=5e7), recompute="never")
    plan = solve(profile, Request(inputs=inputs))
    assert (plan.solver.status, plan.solver.gap) == ("optimal", 0.0)
    assert plan.solver.lower_bound_us == plan.predicted.step_us
    costs, cluster = costs_at(profile, 1), inputs.cluster
    others = [Evaluation(costs, never_recomputed(b, 4), cluster).step_us for b in partitions(7, 3)]
    assert len(others) == 1 + 6 + 15
    assert plan.predicted.step_us <= min(others) * (1 + 1e-12)


def test_a_plan_records_what_was_asked() -> None:
    """Inputs unchanged, every layer once, M·b = B."""
    inputs = inputs_of(3, 12, link=Link(latency_us=1.0), reserve_bytes=5, overhead_us=0.5, memory_bytes=10**6)
    profile = random_profile(3, 9, sizes=(1, 4, 12))
    plan = solve(profile, Request(inputs=inputs))
    assert plan.inputs == inputs
    assert sum(plan.balance) == 9
    assert plan.micro_batches * plan.micro_batch_size == 12
    names = [x.name for x in profile.layers]
    ends = [sum(plan.balance[: k + 1]) for k in range(len(plan.balance))]
    assert [(s.first, s.last) for s in plan.stages] == [(names[a], names[b - 1]) for a, b in pairwise([0, *ends])]


def _plans() -> str:
    texts = []
    for seed in range(3):
        profile = random_profile(seed, 12, exact=seed == 1, sizes=(1, 2, 8))
        inputs = inputs_of(4, 8, memory_bytes=9000, link=Link(latency_us=1.0, bytes_per_s=1e8))
        texts.append(dump(solve(profile, Request(inputs=inputs))))
    # Everything ties: equal layers that cost nothing to move.
    texts.append(dump(solve(profile_of([1.0] * 10, [1.0] * 10), Request(inputs=inputs_of(4, 1)))))
    return "\n".join(texts)


def test_the_same_question_gets_the_same_bytes() -> None:
    """Twice in this process, and in another one that hashes strings in another order."""
    first = _plans()
    assert first == _plans()
    assert first.count("schema: gpipe-plan/plan/v1") == 4
    root = Path(__file__).parents[3]
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('choices', {str(Path(__file__))!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "sys.stdout.write(module._plans())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "12345", "PYTHONIOENCODING": "utf-8"}
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert other.stdout == first


def test_renaming_layers_does_not_change_the_cuts() -> None:
    """Names are not costs."""
    profile = random_profile(9, 10)
    renamed = dataclasses.replace(
        profile, layers=tuple(dataclasses.replace(x, name=f"z{9 - n}") for n, x in enumerate(profile.layers))
    )
    request = Request(inputs=inputs_of(4, 4))
    assert solve(profile, request).balance == solve(renamed, request).balance


@pytest.mark.nightly
def test_an_exact_plan_is_cheaper_than_judging_a_few_thousand_cuts() -> None:
    """40 layers on 8 devices have 18 million cuts; the plan takes less time than judging 3,000 of them one by one."""
    profile = random_profile(5, 40)
    inputs = inputs_of(8, 32)
    costs, cluster = costs_at(profile, 1), inputs.cluster
    partition = never_recomputed((5,) * 8, 32)
    one_by_one = cpu_seconds(lambda: [Evaluation(costs, partition, cluster).step_us for _ in range(3000)])
    assert cpu_seconds(lambda: solve(profile, Request(inputs=inputs))) < one_by_one


@pytest.mark.nightly
def test_twice_the_layers_cost_a_bounded_factor() -> None:
    """From 60 to 120 layers at most 16 times the work: nothing exponential."""
    small, large = (random_profile(5, n) for n in (60, 120))
    inputs = inputs_of(8, 32)
    base = cpu_seconds(lambda: solve(small, Request(inputs=inputs)))
    assert cpu_seconds(lambda: solve(large, Request(inputs=inputs))) < 16 * base
