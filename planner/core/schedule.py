"""Schedules as lists of actions per stage, in the order in which `torch.distributed.pipelining` runs them.

    GPipe, K = 2, M = 3        1F1B, K = 2, M = 3
    stage 0: F0 F1 F2 B0 B1 B2  F0 F1 B0 F2 B1 B2
    stage 1: F0 F1 F2 B0 B1 B2  F0 B0 F1 B1 F2 B2

GPipe: Huang et al. 2019 (arXiv:1811.06965). The paper drains the backward passes in reverse order, torch's
`ScheduleGPipe` in the order of the forward passes; we follow what is executed.
1F1B: Narayanan et al. 2019 (PipeDream), 2021 (PipeDream-Flush, arXiv:2006.09503).
"""

from dataclasses import dataclass
from typing import Literal

from planner.core.errors import UsageError
from planner.core.plan import Schedule

__all__ = ["Action", "actions_of", "num_in_flight"]


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (`F`) or backward (`B`) of one micro-batch on one stage."""

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        """As the engine writes it: `F0`."""
        return f"{self.kind}{self.micro_batch}"


def actions_of(schedule: Schedule, *, num_stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every stage, in execution order.

    Raises:
        UsageError: The schedule cannot run with so few micro-batches.
    """
    if schedule == "gpipe":
        warm_ups = [micro_batches] * num_stages
    else:
        if micro_batches < num_stages:
            raise UsageError(
                f"1F1B needs at least as many micro-batches as stages, got M = {micro_batches}, K = {num_stages}",
                hint="use `--schedule gpipe`, a larger `--batch`, or fewer devices",
            )
        warm_ups = [num_in_flight(schedule, stage, num_stages, micro_batches) for stage in range(num_stages)]
    return tuple(_one_forward_one_backward(warm_up, micro_batches) for warm_up in warm_ups)


def num_in_flight(schedule: Schedule, stage: int, num_stages: int, micro_batches: int) -> int:
    """Most micro-batches that wait for their backward on `stage`: M for GPipe, min(M, K-k) for 1F1B."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, num_stages - stage)


def _one_forward_one_backward(warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    # `warm_up` forwards first, then a backward after each further forward, then the backwards that are left.
    actions = [Action("F", i) for i in range(warm_up)]
    for i in range(micro_batches):
        actions.append(Action("B", i))
        if warm_up + i < micro_batches:
            actions.append(Action("F", warm_up + i))
    return tuple(actions)
