"""Closed form of GPipe's step time, compared with the simulator, the paper and published figures."""

import random
from fractions import Fraction
from typing import Any

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.simulate import StageTimes, simulate
from planner.core.cost.step_time import flow_shop_us, gpipe_step_us
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import Recompute, ScheduleName
from tests.support.profiles import inputs_of, profile_of


def partition_of(
    balance: tuple[int, ...], micro_batches: int, *, recompute: Recompute = "never", schedule: ScheduleName = "gpipe"
) -> Partition:
    """Return a partition with the same recomputation on every stage."""
    return Partition(
        schedule=schedule, micro_batches=micro_batches, balance=balance, recompute=(recompute,) * len(balance)
    )


def predicted_step_us(num_stages: int, micro_batches: int, num_layers: int = 48, batch: int = 32) -> float:
    """Return the step of equal layers with F:B = 1:2 and times proportional to the micro-batch size."""
    size = Fraction(batch, micro_batches)
    profile = profile_of([float(size)] * num_layers, [float(2 * size)] * num_layers)
    balance = (num_layers // num_stages,) * num_stages
    costs, cluster = costs_at(profile, 1), inputs_of(num_stages, 1).cluster
    return Evaluation(costs, partition_of(balance, micro_batches), cluster).step_us


def test_closed_form_equals_the_simulator() -> None:
    rng = random.Random(3)
    with_links = with_last = 0
    for _ in range(400):
        num_stages, micro_batches = rng.randint(1, 7), rng.randint(1, 12)
        kind = rng.choice(["none", "free", "blocking", "mixed"])
        stages = []
        for k in range(num_stages):
            backward = rng.uniform(0, 19)
            send = rng.uniform(0, 15) if kind != "none" and k < num_stages - 1 else 0.0
            stages.append(
                StageTimes(
                    forward_us=rng.choice([0.0, rng.uniform(0, 9)]),
                    backward_us=backward,
                    last_backward_us=rng.choice([backward, rng.uniform(0, backward)]),
                    send_us=send,
                    blocking=rng.random() < 0.5 if kind == "mixed" else kind == "blocking",
                )
            )
        actions = SCHEDULES["gpipe"].actions(num_stages, micro_batches)
        simulated = max(event.end_us for event in simulate(actions, stages))
        assert gpipe_step_us(stages, micro_batches) == pytest.approx(simulated, rel=1e-9)
        with_links += any(s.send_us for s in stages)
        with_last += any(s.last_backward_us != s.backward_us for s in stages)
    assert with_links > 100
    assert with_last > 100


@pytest.mark.parametrize(
    ("stages", "micro_batches", "step_us"),
    [
        # The bottlenecks of forward and backward are different stages.
        (((10, 1, 1), (2, 9, 9)), 5, 12 + 4 * 10 + 10 + 4 * 9),
        # The link is the bottleneck.
        (((1, 2, 2, 7), (3, 4, 4)), 4, 1 + 7 + 3 + 3 * 7 + 4 + 7 + 2 + 3 * 7),
        # A blocking link adds to the receiver.
        (((1, 2, 2, 7, True), (3, 4, 4)), 4, 1 + 10 + 3 * 10 + 4 + 9 + 3 * 9),
        # One micro-batch takes the sum of all times.
        (((1, 100, 2, 5), (3, 100, 4)), 1, 1 + 5 + 3 + 4 + 5 + 2),
    ],
    ids=["two bottlenecks", "slow link", "blocking link", "one micro-batch"],
)
def test_gpipe_steps_by_hand(stages: tuple[tuple[Any, ...], ...], micro_batches: int, step_us: int) -> None:
    """T = ΣF + ΣC + (M-1) max(F, C), and the same backward."""
    names = ("forward_us", "backward_us", "last_backward_us", "send_us", "blocking")
    times = [StageTimes(**dict(zip(names, stage, strict=False))) for stage in stages]
    assert gpipe_step_us(times, micro_batches) == step_us


@pytest.mark.parametrize("num_jobs", [1, 2, 3, 8])
def test_flow_shop_equals_its_recursion(num_jobs: int) -> None:
    """C(job, machine) = max(C(job-1, machine), C(job, machine-1)) + p."""
    rng = random.Random(num_jobs)
    for _ in range(50):
        machines = []
        for _ in range(rng.randint(1, 6)):
            p = rng.uniform(0, 9)
            machines.append((p, rng.uniform(0, p)))
        done = [0.0] * len(machines)
        for job in range(num_jobs):
            before = 0.0
            for n, (p, q) in enumerate(machines):
                done[n] = before = max(done[n], before) + (q if job == num_jobs - 1 else p)
        assert flow_shop_us(machines, num_jobs) == pytest.approx(done[-1], rel=1e-12)


@pytest.mark.parametrize(("num_stages", "published"), [(2, 1.8), (4, 3.4), (8, 6.3)])
def test_speedups_agree_with_the_gpipe_paper(num_stages: int, published: float) -> None:
    """Transformer-48 with M = 32 is compared with K = 2, M = 1: KM/(M+K-1), within 8 % of the measurements."""
    speed_up = predicted_step_us(2, 1) / predicted_step_us(num_stages, 32)
    assert speed_up == pytest.approx(num_stages * 32 / (32 + num_stages - 1), rel=1e-12)
    assert speed_up == pytest.approx(published, rel=0.08)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 32])
def test_cost_of_except_last_agrees_with_published_figures(micro_batches: int) -> None:
    """With F:B = 1:2 on one device the ratio is 3/(3+(M-1)/M): 0.857 at M = 2, 0.858 published."""
    profile = profile_of([1.0] * 6, [2.0] * 6)
    costs, cluster = costs_at(profile, 1), inputs_of(1, 1).cluster
    without = Evaluation(costs, partition_of((6,), micro_batches), cluster).step_us
    spared = Evaluation(costs, partition_of((6,), micro_batches, recompute="except-last"), cluster).step_us
    assert without / spared == pytest.approx(3 / (3 + (micro_batches - 1) / micro_batches), rel=1e-12)
    if micro_batches == 2:
        assert without / spared == pytest.approx(0.858, rel=0.01)
        assert without / spared == pytest.approx(0.853, rel=0.01)


def test_best_cut_depends_on_the_schedule() -> None:
    """GPipe waits for max F + max B, 1F1B for about max(F+B)."""
    costs = costs_at(profile_of([30, 10, 10, 10], [20, 20, 20, 60]), 1)
    cluster = inputs_of(2, 32).cluster
    times = {
        schedule: {
            balance: Evaluation(costs, partition_of(balance, 32, schedule=schedule), cluster).step_us
            for balance in ((1, 3), (2, 2), (3, 1))
        }
        for schedule in ("gpipe", "1f1b")
    }
    best = {schedule: min(of, key=lambda balance: of[balance]) for schedule, of in times.items()}
    assert best == {"gpipe": (3, 1), "1f1b": (2, 2)}
    assert times["1f1b"][2, 2] < times["gpipe"][3, 1]


def test_1f1b_step_is_within_its_bounds() -> None:
    """The lower bound is M times the largest F+B plus the way to and from that stage."""
    rng = random.Random(5)
    for _ in range(50):
        num_stages = rng.randint(1, 5)
        micro_batches = num_stages + rng.randint(0, 6)
        forward = [rng.uniform(1, 9) for _ in range(num_stages)]
        backward = [rng.uniform(1, 9) for _ in range(num_stages)]
        costs = costs_at(profile_of(forward, backward), 1)
        partition = partition_of((1,) * num_stages, micro_batches, schedule="1f1b")
        time = Evaluation(costs, partition, inputs_of(num_stages, 1).cluster).step_us
        pace = [
            sum(forward[:k]) + micro_batches * (forward[k] + backward[k]) + sum(backward[:k]) for k in range(num_stages)
        ]
        assert time >= max(pace) * (1 - 1e-12)
        assert time <= sum(forward) + sum(backward) + 2 * micro_batches * (max(forward) + max(backward))
