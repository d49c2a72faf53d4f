"""Per-layer recomputation under schedules other than GPipe."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.errors import InfeasibleError
from planner.core.judge.verdict import judge
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import Inputs, Plan, ScheduleName
from planner.core.values.profile import Profile
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.layers.devices import RecomputeSearch
from planner.solve.space.partitions import Evaluator
from tests.support.chains import heavy_chain, random_profile
from tests.support.profiles import inputs_of


def inputs_for(schedule: ScheduleName, **changes: object) -> Inputs:
    """Return inputs of two devices, each with as many stages as the schedule needs."""
    rule = SCHEDULES.get(schedule)
    chunks = (rule.exact_chunks or 2 if rule.is_chunked else 1) if rule else 0
    return replace(inputs_of(2, 4, overhead_us=2.0), schedule=schedule, chunks=chunks, **changes)


def solved(profile: Profile, inputs: Inputs, *, balance: tuple[int, ...] | None = None) -> Plan:
    """Return the plan for four micro-batches, accepted by `check`."""
    plan = solve(profile, Request(inputs=inputs, micro_batches=4, balance=balance))
    assert judge(plan, profile, profile_digest=plan.inputs.profile.digest, strict=True).fits
    assert plan.solver.lower_bound_us <= plan.predicted.step_us
    return plan


@pytest.mark.parametrize(("schedule", "least"), [("1f1b", 0.05), ("interleaved", 0.02), ("zb-h1", 0.3), ("zbv", 0.02)])
def test_per_layer_recomputation_is_at_least_as_fast_as_whole_stages(schedule: ScheduleName, least: float) -> None:
    gains = []
    for seed, share in ((1, 0.85), (2, 0.7)):
        profile = heavy_chain(seed, 9)
        cap = int(share * max(solved(profile, inputs_for(schedule, recompute="never")).peak_bytes_by_device()))
        inputs = inputs_for(schedule, recompute="auto", memory_bytes=(cap, cap))
        try:
            whole = solved(profile, inputs)
        except InfeasibleError:
            continue
        free = solved(profile, replace(inputs, recompute="layers"))
        same_cuts = solved(profile, replace(inputs, recompute="layers"), balance=whole.balance)
        assert free.predicted.step_us <= same_cuts.predicted.step_us * (1 + 1e-9)
        assert same_cuts.predicted.step_us <= whole.predicted.step_us * (1 + 1e-9)
        gains.append(1 - free.predicted.step_us / whole.predicted.step_us)
    assert max(gains) > least


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.45), ("zb-h1", 0.7), ("zbv", 0.55)])
def test_per_layer_recomputation_fits_if_whole_stages_do_not(schedule: ScheduleName, share: float) -> None:
    """A stage that is recomputed as a whole holds all its activations in its backward."""
    profile = heavy_chain(int(schedule != "zbv"), 9)
    cap = int(share * max(solved(profile, inputs_for(schedule, recompute="never")).peak_bytes_by_device()))
    inputs = inputs_for(schedule, recompute="auto", memory_bytes=(cap, cap))
    with pytest.raises(InfeasibleError):
        solved(profile, inputs)
    assert solved(profile, replace(inputs, recompute="layers")).predicted.recompute_share > 0


def test_auto_with_per_layer_recomputation_is_at_least_as_fast_as_each_schedule() -> None:
    profile = heavy_chain(0, 9)
    inputs = inputs_for("auto", recompute="layers", memory_bytes=(6000, 6000))
    best = solved(profile, inputs)
    whole = solved(profile, replace(inputs, recompute="auto"))
    assert best.predicted.step_us <= whole.predicted.step_us
    for name in ("gpipe", "1f1b", "interleaved"):
        other = solved(profile, inputs_for(name, recompute="layers", memory_bytes=(6000, 6000)))
        assert best.solver.lower_bound_us <= other.predicted.step_us
        assert best.predicted.step_us <= other.predicted.step_us * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zbv"])
def test_recomputed_layers_of_a_device_equal_the_best_subset(schedule: ScheduleName, *, exact: bool) -> None:
    """With two stages on a device the choice may be up to 2 % more expensive."""
    chunks = SCHEDULES[schedule].exact_chunks or 2 if SCHEDULES[schedule].is_chunked else 1
    spent = least = 0.0
    for seed in range(4):
        profile = random_profile(seed, 8, exact=exact)
        inputs = replace(inputs_of(2, 4), schedule=schedule, chunks=chunks, recompute="layers")
        case = cases_of(profile, Request(inputs=inputs, micro_batches=4))[0]
        evaluator = Evaluator(case, 2)
        cuts = np.array([0, 4, 8] if chunks == 1 else [0, 2, 4, 6, 8])
        layers = [n for s in evaluator.stages_by_device[0] for n in range(cuts[s], cuts[s + 1])]
        subsets = [some for count in range(len(layers) + 1) for some in combinations(layers, count)]
        held = {some: bytes_with(evaluator, cuts, some) for some in subsets}
        for share in (0.0, 0.3, 0.7):
            cap = int(min(held.values()) + share * (held[()] - min(held.values())))
            caps = replace(case.cluster, memory_bytes=(cap, cap))
            cheapest = RecomputeSearch(Evaluator(replace(case, cluster=caps), 2)).recomputations(0, cuts)[0]
            best = min(4 * case.costs.forward_us[list(some)].sum() for some in subsets if held[some] <= cap)
            if chunks == 1:
                assert cheapest.excess_bytes == 0
                assert cheapest.recompute_us <= best * (1 + 1e-9)
            if set(cheapest.choices) <= {0, 3} and cheapest.excess_bytes == 0:
                assert held[tuple(sorted(n for some in cheapest.recomputed for n in some))] <= cap
                spent, least = spent + cheapest.recompute_us, least + best
    assert spent <= 1.02 * least


def bytes_with(evaluator: Evaluator, cuts: np.ndarray, recomputed: tuple[int, ...]) -> int:
    """Return the peak of the first device with these layers recomputed, by the cost model."""
    some = tuple(tuple(n for n in recomputed if first <= n < end) for first, end in pairwise(cuts.tolist()))
    partition = Partition(
        schedule=evaluator.case.schedule.name,
        micro_batches=4,
        balance=tuple(np.diff(cuts).tolist()),
        recompute=tuple("layers" if layers else "never" for layers in some),
        recomputed=some if any(some) else (),
        chunks=evaluator.case.chunks,
    )
    stages = Evaluation(evaluator.case.costs, partition, evaluator.case.cluster).stages
    return sum(stages[s].memory.total for s in evaluator.stages_by_device[0])


def test_search_accepts_given_cuts_with_one_chunk() -> None:
    profile, inputs = heavy_chain(1, 6), inputs_for("search")
    free, one = (solved(profile, replace(inputs, chunks=chunks), balance=(3, 3)) for chunks in (0, 1))
    assert one.chunks == 1
    assert one.predicted.step_us == free.predicted.step_us
