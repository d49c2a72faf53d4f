"""Busy time of a stage and its optimizer step: one rule for single stages and tables of stages."""

import random

import numpy as np
import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.simulate import StageTimes
from planner.core.cost.stage_time import CHOICES, LAYERS, ChainSums, busy_times, optimizer_delay_us, optimizer_slack_us
from planner.core.values.cluster import Cluster, Link
from planner.core.values.plan import Recompute
from tests.support.chains import even_chain, random_profile


def tail_of(stages: list[StageTimes], between_steps_us: list[float]) -> float:
    """Return the tail of the optimizer steps `between_steps_us`."""
    return float(
        optimizer_delay_us(np.array(between_steps_us), np.array([optimizer_slack_us(s, s.send_us) for s in stages]))
    )


def test_optimizer_step_is_hidden_by_drain_and_fill() -> None:
    """All of stage 0's step counts.

    For stage k, only the part beyond backward, forward and links of the previous stages counts.
    """
    stages = [
        StageTimes(forward_us=4, backward_us=9, last_backward_us=7, send_us=1),
        StageTimes(forward_us=3, backward_us=6, last_backward_us=6, send_us=2),
        StageTimes(forward_us=1, backward_us=1, last_backward_us=1),
    ]
    assert tail_of(stages, [5, 0, 0]) == 5
    assert tail_of(stages, [5, 13, 0]) == 5  # 4 + 7 + 2 of it are hidden
    assert tail_of(stages, [5, 20, 0]) == 20 - 13
    assert tail_of(stages, [5, 20, 40]) == 40 - 13 - (3 + 6 + 4)
    assert tail_of(stages, [0, 0, 0]) == 0


def test_recomputation_hides_no_optimizer_step() -> None:
    """More work must never make a step shorter."""
    stages = [
        StageTimes(forward_us=4, backward_us=9, last_backward_us=9, recompute_us=4, last_recompute_us=4),
        StageTimes(forward_us=1, backward_us=1, last_backward_us=1),
    ]
    assert tail_of(stages, [0, 20]) == 20 - 4 - 5


def test_tails_of_many_partitions_equal_those_of_each() -> None:
    rng = np.random.default_rng(0)
    own, hidden = rng.uniform(0, 50, (7, 3, 5)), rng.uniform(0, 9, (7, 3, 5))
    tails = optimizer_delay_us(own, hidden)
    for place in np.ndindex(7, 3):
        each = [own[place][k] - hidden[place][:k].sum() for k in range(5)]
        assert tails[place] == pytest.approx(max(each))


@pytest.mark.parametrize(
    ("choice", "recompute_us", "last_recompute_us"),
    [("never", 0, 0), ("except-last", 5, 0), ("always", 5, 5), ("layers", 2, 2)],
)
def test_recompute_time_of_each_choice(choice: Recompute, recompute_us: float, last_recompute_us: float) -> None:
    """Recomputation excludes the executor's overhead; a device with speed 2 halves it."""
    code = (*CHOICES, "layers").index(choice)
    times = busy_times(
        np.float64(10), np.float64(30), code, has_backward=True, recomputed_layers_us=4.0, speed=2.0, overhead_us=0.5
    )
    assert times == (5.5, 15.5 + recompute_us, 15.5 + last_recompute_us, recompute_us, last_recompute_us)


@pytest.mark.parametrize("code", range(LAYERS))
def test_stages_without_backward_have_no_recompute_time(code: int) -> None:
    times = busy_times(np.float64(10), np.float64(30), code, has_backward=False)
    assert times == (10, 30, 30, 0, 0)


def test_tables_of_stage_times_equal_partitions() -> None:
    rng = random.Random(5)
    for seed in range(40):
        num_layers, replicas = rng.randint(4, 9), rng.choice([1, 3])
        costs = costs_at(random_profile(seed, num_layers), 1).of_replicas(replicas)
        cluster = Cluster(
            memory_bytes=(10**9,) * 2 * replicas,
            overhead_us=1.5,
            link=Link(latency_us=2.0, bytes_per_s=1e6),
            allreduce=Link(latency_us=7.0, bytes_per_s=1e6),
        )
        cut = rng.randint(1, num_layers - 1)
        choices = [rng.choice(CHOICES) for _ in range(2)]
        partition = Partition(
            schedule="gpipe",
            micro_batches=3,
            balance=(cut, num_layers - cut),
            recompute=tuple(choices),
            replicas=replicas,
        )
        sums, first, end = ChainSums.of(costs, cluster, replicas), np.array([0, cut]), np.array([cut, num_layers])
        busy = sums.busy_times(first, end, [CHOICES.index(choice) for choice in choices], speed=1.0)
        evaluation = Evaluation(costs, partition, cluster)
        stages = evaluation.stage_times
        for name, values in busy._asdict().items():
            assert values == pytest.approx([getattr(stage, name) for stage in stages])
        own = sums.between_steps_us(first, end, 1.0)
        assert own == pytest.approx(evaluation.between_steps_us)
        crossing = cluster.link.transfer_us(sums.crossing_bytes[end]) * (end < num_layers)
        tail = optimizer_delay_us(own, np.asarray(optimizer_slack_us(busy, crossing)))
        assert tail == pytest.approx(evaluation.optimizer_delay_us)


def test_stages_without_gradients_have_no_all_reduce() -> None:
    cluster = Cluster(memory_bytes=(10**9,) * 4, allreduce=Link(latency_us=7.0, bytes_per_s=1e6))
    costs = costs_at(even_chain([3, 3, 3], [0, 4, 0]), 1).of_replicas(2)
    own = ChainSums.of(costs, cluster, 2).between_steps_us(np.array([0, 1, 2]), np.array([1, 2, 3]), 1.0)
    assert own.tolist() == [0.0, 2 * (7.0 + 2.0), 0.0]
