"""Quick search over tensor-parallel widths, replicas and micro-batches, to decide where to search longer."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final

from planner.core.cost.evaluate import Evaluation
from planner.core.schedule import ONE_FORWARD_ONE_BACKWARD
from planner.solve.answer import Answer
from planner.solve.deadline import Deadline, OutOfTimeError
from planner.solve.space.case import Case

_FAR: Final = 1.3
"""A case is skipped if its lower bound exceeds the fastest step time found by this factor."""

_TABLE_ACTIONS: Final = 2_000
"""Budget of a case for computing tables, in simulated actions."""

_SIMULATIONS: Final = 4
"""Budget of a case for simulations, in training steps: 3 for the action order, 1 for a batch of partitions."""


def quick_answers(cases: Sequence[Case], deadline: Deadline, *, upper_us: float) -> list[Answer]:
    """Return the plans under 1F1B that short searches find.

    There is at most one for each combination of tensor-parallel width, replicas and number of micro-batches.

    Args:
        cases: Combinations to search. Their schedules are replaced by 1F1B.
        deadline: Time at which the searches stop.
        upper_us: Step time that a plan must beat, in microseconds.
    """
    from planner.solve.chain.one_forward_one_backward import search_one_forward_one_backward  # noqa: PLC0415

    answers: list[Answer] = []
    by_devices = sorted(cases, key=lambda case: case.num_devices)
    plain = {width_replicas_and_micro_batches(case): _under_1f1b(case) for case in by_devices}
    for case in sorted(plain.values(), key=lambda case: (case.bound_us, *width_replicas_and_micro_batches(case))):
        near_us = _FAR * min((answer.step_us for answer in answers), default=inf)
        if case.bound_us >= min(near_us, upper_us):
            continue
        try:
            actions = 2 * case.num_devices * case.micro_batches
            short = replace(deadline.share(0.1), most_actions=_TABLE_ACTIONS + _SIMULATIONS * actions)
            answer = search_one_forward_one_backward(case, upper_us=min(near_us, upper_us), deadline=short)
        except OutOfTimeError:
            continue
        answers += [answer] if answer.partition is not None else []
    return answers


def _under_1f1b(case: Case) -> Case:
    one = ONE_FORWARD_ONE_BACKWARD
    num_devices = int(min(case.num_devices, one.most_devices(case.micro_batches)))
    return replace(case, schedule=one, chunks=1, num_devices=num_devices, _memory={})


def width_replicas_and_micro_batches(case: Case) -> tuple[int, int, int]:
    """Return the tensor-parallel width, the number of replicas, and the number of micro-batches of a case."""
    return case.cluster.tensor_parallel, case.replicas, case.micro_batches


def step_us_without_bubble(answer: Answer) -> float:
    """Return the step time of a plan minus its bubble."""
    assert answer.partition is not None
    evaluation = Evaluation(answer.case.costs, answer.partition, answer.case.cluster)
    return evaluation.step_us - evaluation.predicted.bubble * evaluation.pipeline_us
