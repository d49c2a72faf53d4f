"""Interleaved 1F1B: Narayanan et al. 2021 (arXiv:2104.04473). Each device runs several stages (chunks) in turn.

    K = 2, M = 2, two chunks per device: stages 0 and 2, 1 and 3
    device 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    device 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

In the paper M is a multiple of K, and chunks take turns every K micro-batches. torch's `ScheduleInterleaved1F1B` has
max(1, M // K) rounds, and M must be a multiple of this number. With one chunk per device, this is 1F1B with
2 (K-k) - 1 instead of K-k warm-up forwards on device k.
"""

from collections.abc import Sequence
from typing import ClassVar

from planner.core.errors import UsageError
from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.kinds import Letter
from planner.core.values.plan import ScheduleName


class Interleaved(Schedule):
    """1F1B with several stages per device, which the device runs in turn."""

    name = "interleaved"
    title = "interleaved 1F1B"
    torch_name = "Interleaved1F1B"
    is_chunked = True
    one_stage_name: ClassVar[ScheduleName] = "1f1b"
    """Name of a schedule with one stage per device. Error messages suggest it if interleaving is not possible."""

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the action order of torch's schedule, without idle slots."""
        per_round = self.micro_batches_per_round(num_devices, micro_batches)
        stages = self.stages_on(device, num_devices, chunks)
        forwards = actions_in_rounds("F", stages, micro_batches, per_round)
        backwards = actions_in_rounds("B", stages[::-1], micro_batches, per_round)
        warm_up = min(chunks * micro_batches, (chunks - 1) * per_round + 2 * (num_devices - 1 - device))
        steady = chunks * micro_batches - warm_up
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
            actions += (forward, backward)
        return (*actions, *backwards[steady:])

    def check_supported(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raise UsageError if the micro-batches cannot be divided into rounds of equal length."""
        super().check_supported(num_devices, micro_batches, chunks)
        rounds = _num_rounds(num_devices, micro_batches)
        if micro_batches % rounds:
            fewer = micro_batches - micro_batches % rounds
            raise UsageError(
                f"{self.title} runs the micro-batches in M // K = {rounds} rounds of equal size, which is impossible "
                f"with M = {micro_batches}, K = {num_devices} devices",
                hint=f"use `--micro-batches {fewer}` or a multiple of {num_devices}, "
                f"or `--schedule {self.one_stage_name}`",
            )

    def micro_batches_per_round(self, num_devices: int, micro_batches: int) -> int:
        """Return the number of micro-batches that a stage runs before the device turns to its next stage."""
        return micro_batches // _num_rounds(num_devices, micro_batches)

    def micro_batch_multiple(self, num_devices: int) -> int:
        """Return `num_devices`: every multiple of this number is allowed as the number of micro-batches."""
        return num_devices


def _num_rounds(num_devices: int, micro_batches: int) -> int:
    return max(1, micro_batches // num_devices)


def actions_in_rounds(kind: Letter, stages: Sequence[int], micro_batches: int, per_round: int) -> list[Action]:
    """Return a device's actions of one kind, round by round: each stage in turn runs all micro-batches of a round.

    Args:
        kind: Kind of all actions.
        stages: Stages of the device, in the order of their turns.
        micro_batches: Number of micro-batches.
        per_round: Micro-batches per round.
    """
    return [
        Action(stage, kind, i)
        for first in range(0, micro_batches, per_round)
        for stage in stages
        for i in range(first, first + per_round)
    ]
