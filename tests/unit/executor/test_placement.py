"""Tests of the assignment of stages and replicas to processes."""

from dataclasses import replace

import pytest

from planner.core.errors import UsageError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import ScheduleName
from planner.core.values.profile import Model
from planner.executor.run.placement import process_place


def balance_of(stages: int, *, schedule: ScheduleName = "gpipe", chunks: int = 1, replicas: int = 1) -> Balance:
    """Return a plan with one layer per stage."""
    return Balance(
        plan_digest="sha256:plan",
        model=Model(source="model.py:build_model"),
        schedule=schedule,
        chunks=chunks,
        replicas=replicas,
        batch=8 * replicas,
        micro_batches=4,
        balance=(1,) * stages,
        stages=tuple(StageBalance(index=k, recompute="never", layers=(str(k),)) for k in range(stages)),
    )


def test_ranks_of_replicas_and_chunks() -> None:
    """K = 2, V = 3, R = 2: neighbors in a pipeline have consecutive ranks, and the second replica follows the first."""
    balance = balance_of(6, schedule="interleaved", chunks=3, replicas=2)
    places = [process_place(balance, rank, 4) for rank in range(4)]
    assert [place.stages for place in places] == [(0, 2, 4), (1, 3, 5), (0, 2, 4), (1, 3, 5)]
    assert [place.replica for place in places] == [0, 0, 1, 1]
    assert [place.is_first for place in places] == [True, False, True, False]
    assert [place.is_last for place in places] == [False, True, False, True]
    assert [places[2].rank_of(stage) for stage in range(6)] == [2, 3, 2, 3, 2, 3]
    same = [[place.rank_of(place.stages[0], replica) for replica in range(2)] for place in places]
    assert same == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("balance", "what"),
    [
        (balance_of(4), r"4 processes \(4 stages\)"),
        (balance_of(4, schedule="interleaved", chunks=2), r"2 processes \(2 devices with 2 stages each\)"),
        (balance_of(3, replicas=2), r"6 processes \(2 replicas of 3 stages\)"),
        (balance_of(1), r"1 process \(1 stage\)"),
    ],
)
def test_a_wrong_number_of_processes_is_refused_with_the_command(balance: Balance, what: str) -> None:
    with pytest.raises(UsageError, match=f"the plan needs {what}, but 5 processes were started") as refused:
        process_place(balance, 0, 5)
    assert f"torchrun --nproc-per-node {balance.num_processes} " in refused.value.hint


def test_plans_for_fewer_processes_are_suggested() -> None:
    with pytest.raises(UsageError) as refused:
        process_place(replace(balance_of(3), smaller=(2, 1)), 0, 4)
    assert refused.value.hint.endswith("train.py`; there are plans for 2 or 1 processes, too")
