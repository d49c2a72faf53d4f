"""Figures of a partition worked out by hand, invariants of partitions, and their plans."""

import dataclasses

import numpy as np
import pytest

from planner import __version__
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.memory import stage_memory
from planner.core.cost.partition import Partition, check_partition
from planner.core.cost.simulate import StageTimes, makespans
from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Cluster, Link
from planner.core.values.plan import Predicted, Recompute, ScheduleName, SolverReport
from planner.core.values.profile import Profile
from tests.support.chains import chain, layer, random_profile
from tests.support.peak_points import peak_points_with
from tests.support.profiles import UNLIMITED, inputs_of, profile_of


def partition_of(
    balance: tuple[int, ...],
    micro_batches: int,
    recompute: tuple[Recompute, ...] | None = None,
    schedule: ScheduleName = "gpipe",
) -> Partition:
    """Return a partition, by default without recomputation."""
    choices: tuple[Recompute, ...] = ("never",) * len(balance) if recompute is None else recompute
    return Partition(schedule=schedule, micro_batches=micro_batches, balance=balance, recompute=choices)


def three_layers() -> Profile:
    """Return layers with different times and sizes at two samples per micro-batch."""
    return chain(
        layer("a", forward_us=2.0, backward_us=4.0, optimizer_us=2.0, output_bytes=50, saved_bytes=60),
        layer("b", forward_us=3.0, backward_us=5.0, optimizer_us=3.0, output_bytes=20, saved_bytes=30),
        layer("c", forward_us=4.0, backward_us=9.0, optimizer_us=4.0, output_bytes=0, saved_bytes=10),
        sizes=(2,),
    )


def by_hand() -> tuple[ChainCosts, Partition]:
    """Return stages a, b and c with M = 4, of which the second always recomputes."""
    return costs_at(three_layers(), 2), partition_of((2, 1), 4, ("never", "always"))


LINK = Link(latency_us=1.0, bytes_per_s=1e7)  # 20 bytes: 1 + 2 us


def test_stage_times_are_sums_with_recomputation_links_and_overhead() -> None:
    costs, partition = by_hand()
    cluster = inputs_of(2, 8, link=LINK, overhead_us=0.5).cluster
    assert Evaluation(costs, partition, cluster).stage_times == (
        StageTimes(forward_us=5.5, backward_us=9.5, last_backward_us=9.5, send_us=3.0),
        StageTimes(forward_us=4.5, backward_us=13.5, last_backward_us=13.5, recompute_us=4.0, last_recompute_us=4.0),
    )


def test_a_stage_takes_the_entry_time_of_its_first_layer() -> None:
    """Again when it is recomputed, but not when some of its layers are."""
    a, b, c = (
        dataclasses.replace(each, entry_us=(us,))
        for each, us in zip(three_layers().layers, (1.0, 100.0, 2.0), strict=True)
    )
    costs = costs_at(chain(a, b, c, sizes=(2,)), 2)
    layers = dataclasses.replace(partition_of((2, 1), 4, ("layers", "always")), recomputed=((1,), ()))
    front, back = Evaluation(costs, layers, inputs_of(2, 8).cluster).stage_times
    assert (front.forward_us, front.recompute_us) == (1 + 2 + 3, 3)
    assert (back.forward_us, back.recompute_us) == (2 + 4, 2 + 4)
    # A stage of b and c is not slower than one of a, b and c.
    front, back = Evaluation(costs, partition_of((1, 2), 4), inputs_of(2, 8).cluster).stage_times
    assert (front.forward_us, back.forward_us) == (1 + 2, 1 + 2 + 3 + 4)


def test_except_last_recomputes_for_all_but_the_last_backward() -> None:
    costs = costs_at(three_layers(), 2)
    (times,) = Evaluation(costs, partition_of((3,), 4, ("except-last",)), inputs_of(1, 8).cluster).stage_times
    assert (times.backward_us, times.last_backward_us) == (18 + 9, 18)


@pytest.mark.parametrize("recompute", ["always", "except-last", "layers"])
def test_layers_without_backward_are_not_recomputed(recompute: Recompute) -> None:
    """No layer of stage 0 is trained, nor the first one of stage 1; the profile has no exact records."""
    frozen = [layer(name, forward_us=2.0, backward_us=1.0, gradient_bytes=0, parameter_bytes=8) for name in "abc"]
    trained = layer("d", forward_us=4.0, backward_us=8.0, parameter_bytes=8, output_bytes=0)
    costs = costs_at(chain(*frozen, trained, sizes=(2,)), 2)
    partition = partition_of((2, 2), 3, (recompute, recompute))
    if recompute == "layers":
        partition = dataclasses.replace(partition, recomputed=((0, 1), (2, 3)))
    cluster = inputs_of(2, 6).cluster
    front, back = Evaluation(costs, partition, cluster).stage_times
    assert (front.backward_us, front.last_backward_us, front.recompute_us) == (2, 2, 0)
    again = 4 if recompute == "layers" else 6
    assert (back.recompute_us, back.last_recompute_us) == (again, again * (recompute != "except-last"))
    never = partition_of((2, 2), 3)
    assert Evaluation(costs, partition, cluster).stages[0].memory == Evaluation(costs, never, cluster).stages[0].memory


def test_blocking_links_are_marked_on_the_sending_stage() -> None:
    costs, partition = by_hand()
    cluster = inputs_of(2, 8, link=dataclasses.replace(LINK, blocking=True)).cluster
    times = Evaluation(costs, partition, cluster).stage_times
    assert [(t.send_us, t.blocking) for t in times] == [(3.0, True), (0.0, False)]


def test_predicted_figures_by_hand() -> None:
    """Forward 9 + 3 + 3·5, backward 22 + 3 + 3·13, optimizer step of stage 0: 5; busy 4·14 + 4·17 of 2·91 us."""
    costs, partition = by_hand()
    predicted = Evaluation(costs, partition, inputs_of(2, 8, link=LINK).cluster).predicted
    assert predicted == Predicted(
        step_us=27 + 64 + 5,
        samples_per_s=pytest.approx(8 / 96e-6),
        bubble=pytest.approx(1 - 124 / 182),
        ideal_bubble=1 / 5,
        imbalance=pytest.approx(17 / 15.5),
        recompute_share=pytest.approx(4 * 4 / 124),
        bottleneck_stage=1,
    )


def test_recompute_share_with_except_last_by_hand() -> None:
    """One stage with three micro-batches is always busy, and 2·9 of 99 us are recomputation."""
    costs = costs_at(three_layers(), 2)
    predicted = Evaluation(costs, partition_of((3,), 3, ("except-last",)), inputs_of(1, 6).cluster).predicted
    assert predicted.step_us == 3 * (9 + 18) + 2 * 9 + 9
    assert predicted.bubble == pytest.approx(0.0, abs=1e-12)
    assert predicted.recompute_share == pytest.approx(18 / 99)


def test_predicted_1f1b_by_hand() -> None:
    """Two stages, F 1 and B 2 on both, M = 2: F0 F1 B0 B1 below F0 B0 F1 B1 takes 3·3 = 9, a third of it idle."""
    costs = costs_at(profile_of([1.0, 1.0], [2.0, 2.0]), 1)
    predicted = Evaluation(costs, partition_of((1, 1), 2, schedule="1f1b"), inputs_of(2, 2).cluster).predicted
    assert (predicted.step_us, predicted.ideal_bubble, predicted.imbalance) == (9.0, 1 / 3, 1.0)
    assert predicted.bubble == pytest.approx(1 / 3)


def test_overhead_is_paid_per_micro_batch_stage_and_direction() -> None:
    """Equal stages without links take (M+K-1) times F + B + 2 overheads."""
    costs = costs_at(profile_of([3.0] * 4, [5.0] * 4), 1)
    partition = partition_of((1, 1, 2), 6)
    base = Evaluation(costs, partition, inputs_of(3, 6).cluster).step_us
    slow = Evaluation(costs, partition, inputs_of(3, 6, overhead_us=0.25).cluster).step_us
    assert base == (4 + 5 * 2) * 8
    assert slow - base == pytest.approx((6 + 3 - 1) * 2 * 0.25)


def test_chain_without_time_has_no_bubble_and_no_rate() -> None:
    costs = costs_at(profile_of([0.0, 0.0]), 1)
    predicted = Evaluation(costs, partition_of((1, 1), 2), inputs_of(2, 2).cluster).predicted
    assert (predicted.step_us, predicted.samples_per_s, predicted.bubble) == (0.0, 0.0, 0.0)
    assert (predicted.imbalance, predicted.recompute_share) == (1.0, 0.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_timeline_ends_with_the_step_and_has_every_pass(schedule: ScheduleName) -> None:
    costs = costs_at(random_profile(6, 7), 1)
    partition = partition_of((2, 4, 1), 5, ("always", "never", "except-last"), schedule)
    cluster = inputs_of(3, 5, link=Link(latency_us=2.0, bytes_per_s=1e7)).cluster
    evaluation = Evaluation(costs, partition, cluster)
    events = evaluation.events
    assert len([e for e in events if e.kind in ("F", "B")]) == 2 * 3 * 5
    optimizer_us = float(costs.optimizer_us[:2].sum())
    assert optimizer_us > 0
    assert evaluation.step_us == pytest.approx(max(e.end_us for e in events) + optimizer_us, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_have_names_times_limit_and_memory(schedule: ScheduleName) -> None:
    profile = random_profile(6, 7)
    costs = costs_at(profile, 1)
    partition = partition_of((2, 4, 1), 5, ("always", "never", "except-last"), schedule)
    cluster = inputs_of(3, 5, memory_bytes=(10, 20, 30), reserve_bytes=7).cluster
    stages = Evaluation(costs, partition, cluster).stages
    assert [(s.index, s.first, s.last, s.layers, s.memory_bytes) for s in stages] == [
        (0, "layers.0", "layers.1", 2, 10),
        (1, "layers.2", "layers.5", 4, 20),
        (2, "layers.6", "layers.6", 1, 30),
    ]
    for stage, (first, end), held in zip(
        stages, ((0, 2), (2, 6), (6, 7)), (5, 5, 5) if schedule == "gpipe" else (3, 2, 1), strict=True
    ):
        assert stage.recompute == partition.recompute[stage.index]
        assert stage.forward_us == float(costs.forward_us[first:end].sum())
        assert stage.memory == stage_memory(
            costs, first, end, peak_points_with(5, held), recompute=stage.recompute, reserve_bytes=7
        )


@pytest.mark.parametrize(
    ("balance", "recompute", "num_layers", "num_devices", "said"),
    [
        ((), (), 3, 2, "every stage needs at least one layer"),
        ((3, 0), None, 3, 2, r"at least one layer, got the balance \[3, 0\]"),
        ((4, -1), None, 3, 2, r"at least one layer, got the balance \[4, -1\]"),
        ((1, 1), None, 3, 2, r"\[1, 1\] adds up to 2 layers, the profile has 3"),
        ((2, 2), None, 3, 2, r"\[2, 2\] adds up to 4 layers, the profile has 3"),
        ((1, 1, 1), None, 3, 2, "3 stages need 3 devices, there are 2"),
        ((2, 1), ("never",), 3, 2, "2 stages, but 1 recompute choices"),
    ],
)
def test_invalid_partitions_are_refused(balance, recompute, num_layers, num_devices, said):
    with pytest.raises(UsageError, match=said):
        check_partition(partition_of(balance, 4, recompute), num_layers=num_layers, num_devices=num_devices)


def test_1f1b_with_too_few_micro_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="M = 1, K = 2"):
        check_partition(partition_of((2, 1), 1, schedule="1f1b"), num_layers=3, num_devices=2)


@pytest.mark.parametrize("balance", [(3,), (1, 2), (1, 1, 1)])
def test_valid_partitions_are_accepted(balance: tuple[int, ...]) -> None:
    assert check_partition(partition_of(balance, 1), num_layers=3, num_devices=3) is None


def test_intervals_cover_every_layer_once() -> None:
    assert partition_of((2, 4, 1), 1).intervals() == ((0, 2), (2, 6), (6, 7))


def test_plan_has_inputs_figures_and_partition() -> None:
    costs, partition = by_hand()
    inputs = inputs_of(2, 8, link=LINK)
    solver = SolverReport(method="dynamic-programming", status="optimal", lower_bound_us=96.0)
    plan = Evaluation(costs, partition, inputs.cluster).plan(inputs, solver)
    assert (plan.generator.name, plan.generator.version) == ("gpipe-plan", __version__)
    assert (plan.inputs, plan.solver) == (inputs, solver)
    assert (plan.micro_batches, plan.micro_batch_size, plan.balance) == (4, 2, (2, 1))
    assert plan.predicted == Evaluation(costs, partition, inputs.cluster).predicted
    assert plan.stages == Evaluation(costs, partition, inputs.cluster).stages
    assert Partition.of(plan, costs.names) == partition
    assert {stage.memory_bytes for stage in plan.stages} == {UNLIMITED}


def test_given_cuts_have_no_bound_and_no_gap() -> None:
    costs, partition = by_hand()
    solver = SolverReport(method="given", status="given", gap=0.3, lower_bound_us=50.0)
    plan = Evaluation(costs, partition, inputs_of(2, 8).cluster).plan(inputs_of(2, 8), solver)
    assert plan.solver == SolverReport(method="given", status="given")


def test_transfer_over_a_link_without_bandwidth_limit_takes_its_latency() -> None:
    assert Link(latency_us=5.0).transfer_us(1e12) == 5.0
    assert Link(latency_us=5.0, bytes_per_s=25e9).transfer_us(1e9) == pytest.approx(5.0 + 40_000)
    assert Link().transfer_us(1e12) == 0.0


@pytest.mark.parametrize("allreduce_us", [0.5, 40.0])
@pytest.mark.parametrize("name", ["zb-h1", "zbv", "interleaved-zb"])
def test_replicas_sum_gradients_of_a_chunk_after_its_last_weight_gradient(name, allreduce_us):
    """By the events of the step: stage by stage as they end their last W, then the device's optimizer steps."""
    costs = costs_at(random_profile(5, 12), 1)
    chunks = 2 if SCHEDULES[name].is_chunked else 1
    partition = Partition(
        schedule=name,
        micro_batches=4,
        balance=(12 // (2 * chunks),) * 2 * chunks,
        recompute=("never",) * 2 * chunks,
        chunks=chunks,
        replicas=2,
    )
    cluster = Cluster(memory_bytes=(10**9,) * 4, allreduce=Link(latency_us=allreduce_us, bytes_per_s=1e9))
    evaluation = Evaluation(costs, partition, cluster)
    times, sums_us = evaluation.stage_times, evaluation.gradient_allreduce_us
    optimizers_us = [float(costs.optimizer_us[first:end].sum()) for first, end in partition.intervals()]
    periods, all_us = [], []
    for device in range(2):
        own = [e for e in evaluation.events if e.device == device and not e.kind.startswith("send")]
        ends = {stage: max(e.end_us for e in own if e.stage == stage) for stage in partition.chunks_of(device)}
        summed_us = 0.0
        for stage, end_us in sorted(ends.items(), key=lambda item: item[1]):
            summed_us = max(summed_us, end_us) + sums_us[stage]
        periods.append(summed_us - min(e.start_us for e in own) + sum(optimizers_us[s] for s in ends))
        all_us.append(sum(optimizers_us[s] + sums_us[s] for s in ends))
    assert evaluation.step_us == pytest.approx(max(periods), rel=1e-9)
    arrays = {
        name: np.array([[getattr(stage, name) for stage in times]])
        for name in (field.name for field in dataclasses.fields(StageTimes))
        if name not in {"recompute_us", "last_recompute_us", "blocking"}
    }
    many_us = makespans(
        partition.actions(), arrays, between_steps_us=np.array([all_us]), allreduce_us=np.array([sums_us])
    )
    assert many_us == pytest.approx([max(periods)], rel=1e-9)
