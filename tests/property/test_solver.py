"""Solver compared with brute force, and closed form compared with simulator, on random problems."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.errors import InfeasibleError
from planner.core.judge.verdict import judge
from planner.core.values.plan import Plan
from planner.solve import Request, solve
from planner.solve.request import MOST_ACTIONS_OF_AUTO
from tests.support.brute_force import EQUAL
from tests.support.random_problems import Features, Problem, num_examples, problems

GPIPE = Features()
UNLIKE = Features(unlike=True)
REPLICAS = Features(replicas=(0, 2, 3))
RULES = Features(rules=True, tied=True)
ONE_FORWARD_ONE_BACKWARD = Features(schedules=("1f1b",))
ONE_FORWARD_ONE_BACKWARD_UNLIKE = Features(schedules=("1f1b",), unlike=True, rules=True)
INTERLEAVED = Features(schedules=("interleaved",), chunks=(2, 1, 3, 0))
INTERLEAVED_UNLIKE = Features(schedules=("interleaved",), chunks=(2, 0), unlike=True, rules=True, tied=True)
EVERYTHING = Features(
    schedules=("auto", "interleaved", "1f1b", "gpipe"), chunks=(0, 1, 2), replicas=(0, 1, 2), rules=True, tied=True
)
LAYERS = Features(policies=("layers",), most_layers=5, most_devices=3, unlike=True)
LAYERS_1F1B = Features(policies=("layers",), schedules=("1f1b",), most_layers=5, most_devices=3, unlike=True)


def examples(count: int) -> settings:
    """Return settings for `num_examples(count)` examples without a time limit for brute force."""
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    return settings(max_examples=num_examples(count), deadline=None, suppress_health_check=slow)


def check_plan(problem: Problem, *, actions: int | None = MOST_ACTIONS_OF_AUTO) -> Plan | None:
    """Solve, compare with brute force, and return the plan; None if neither finds one."""
    space = problem.space
    best = space.best()
    request = Request(inputs=problem.inputs, micro_batches=problem.micro_batches, actions=actions)
    try:
        plan = solve(problem.profile, request)
    except InfeasibleError:
        assert best is None, f"infeasible, but {best} fits"
        return None
    assert best is not None, "brute force finds nothing that fits"
    found, solver = plan.predicted.step_us, plan.solver
    if solver.status == "optimal":
        assert found == pytest.approx(best.step_us, rel=EQUAL), best
        assert (solver.lower_bound_us, solver.gap) == (found, 0.0)
    else:
        assert solver.status == "feasible"
        assert solver.lower_bound_us <= best.step_us * (1 + EQUAL)
        assert best.step_us <= found * (1 + EQUAL)
        assert solver.gap == pytest.approx(1 - solver.lower_bound_us / found)
    check_prediction(problem, plan)
    return plan


def check_prediction(problem: Problem, plan: Plan) -> None:
    """Check that `check` accepts the plan and that the simulator agrees with its step time."""
    verdict = judge(plan, problem.profile, profile_digest=plan.inputs.profile.digest)
    assert (verdict.fits, [each for each in verdict.findings if each.code != "GP103"]) == (True, [])
    evaluation = Evaluation.of(plan, problem.profile)
    simulated = max(event.end_us for event in evaluation.events)
    assert plan.predicted.step_us == pytest.approx(simulated + evaluation.optimizer_delay_us, rel=EQUAL)


def check_rank(problem: Problem, plan: Plan) -> None:
    """Check that no equally fast plan of the same M and R has a lower peak, moves less, or is evener, in this order."""
    partition = Partition.of(plan, [layer.name for layer in problem.profile.layers])
    space = problem.space
    wanted = space.first_by_rank(partition, plan.predicted.step_us)
    peak, moved, squares = space.rank_of(partition)
    assert (peak, moved) == pytest.approx(wanted[:2], rel=EQUAL), "another plan as fast has a lower peak or moves less"
    assert squares == pytest.approx(wanted[2], rel=EQUAL), "another plan as fast is evener"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "count"),
    [
        pytest.param(GPIPE, 250, id="gpipe"),
        # Devices differ in memory limit and speed, and links within nodes from links between them.
        pytest.param(UNLIKE, 200, id="unlike devices"),
        pytest.param(REPLICAS, 100, id="replicas"),
        pytest.param(RULES, 150, id="placement rules and tied layers"),
    ],
)
def test_gpipe_equals_brute_force(features: Features, count: int) -> None:
    @examples(count)
    @given(problems(features))
    def equal(problem: Problem) -> None:
        plan = check_plan(problem)
        if plan is not None:
            assert plan.solver.status == "optimal"
            check_rank(problem, plan)

    equal()


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        pytest.param(Features(links=True), id="gpipe"),
        pytest.param(Features(links=True, unlike=True), id="gpipe-unlike"),
        pytest.param(Features(links=True, replicas=(0, 1, 2)), id="replicas"),
        pytest.param(Features(links=True, schedules=("1f1b",)), id="1f1b"),
        pytest.param(Features(links=True, schedules=("interleaved",), chunks=(2,)), id="interleaved"),
    ],
)
def test_different_links_equal_brute_force(features: Features) -> None:
    """Each boundary has its own link; the list has as many links as needed, or one more."""

    @examples(50)
    @given(problems(features))
    def equal(problem: Problem) -> None:
        check_plan(problem)

    equal()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "count"),
    [
        pytest.param(ONE_FORWARD_ONE_BACKWARD, 150, id="1f1b"),
        pytest.param(ONE_FORWARD_ONE_BACKWARD_UNLIKE, 150, id="1f1b-unlike"),
        pytest.param(INTERLEAVED, 80, id="interleaved"),
        pytest.param(INTERLEAVED_UNLIKE, 60, id="interleaved-unlike"),
        pytest.param(EVERYTHING, 120, id="everything"),
    ],
)
def test_simulated_schedules_equal_brute_force(features: Features, count: int) -> None:
    """Schedule `auto` has a bounded budget by default, so only nearly all of its plans are proven optimal."""
    statuses: Counter[str] = Counter()

    @examples(count)
    @given(problems(features))
    def equal(problem: Problem) -> None:
        if problem.inputs.schedule == "auto":
            check_plan(problem)
        plan = check_plan(problem, actions=None)
        statuses[plan.solver.status if plan is not None else "infeasible"] += 1

    equal()
    assert statuses["optimal"] > 0
    assert statuses["feasible"] <= 0.02 * statuses["optimal"], statuses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "count"),
    [
        pytest.param(LAYERS, 80, id="gpipe"),
        pytest.param(LAYERS_1F1B, 30, id="1f1b"),
    ],
)
def test_per_layer_recomputation_equals_brute_force(features: Features, count: int) -> None:
    """Brute force tries every subset of each stage's layers. Plans that are not proven optimal have a true gap."""

    @examples(count)
    @given(problems(features))
    def equal(problem: Problem) -> None:
        check_plan(problem)

    equal()


@pytest.mark.slow
@examples(40)
@given(problems(Features(unlike=True, rules=True)))
def test_the_integer_program_equals_brute_force(problem: Problem) -> None:
    best = problem.space.best()
    request = Request(inputs=problem.inputs, micro_batches=problem.micro_batches, solver="milp")
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(problem.profile, request)
        return
    plan = solve(problem.profile, request)
    assert plan.predicted.step_us == pytest.approx(best.step_us, rel=EQUAL)
    check_prediction(problem, plan)


@pytest.mark.slow
@examples(100)
@given(st.data())
def test_brute_force_uses_the_cost_model(data: st.DataObject) -> None:
    """The arrays of brute force have the step time and peaks that the cost model computes for each plan."""
    features = data.draw(st.sampled_from([UNLIKE, REPLICAS, INTERLEAVED_UNLIKE, EVERYTHING, LAYERS]))
    space = data.draw(problems(features)).space
    for block in space.blocks[:: max(1, len(space.blocks) // 6)]:
        row = data.draw(st.integers(0, len(block.cuts) - 1))
        time_us, peaks = space.judged(block, row)
        assert block.step_us[row] == pytest.approx(time_us, rel=EQUAL)
        assert tuple(block.peaks[row]) == peaks
        evaluation = Evaluation(block.tables.costs, block.partition(row), space.inputs.cluster)
        simulated = max(event.end_us for event in evaluation.events)
        assert evaluation.step_us == pytest.approx(simulated + evaluation.optimizer_delay_us, rel=EQUAL)
