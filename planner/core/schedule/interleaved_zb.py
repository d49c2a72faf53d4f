"""Interleaved zero bubble: torch's `ScheduleInterleavedZeroBubble`, ZB-1P of arXiv:2401.10241 without its solver.

    K = 2, M = 2, two chunks per device: stages 0 and 2, 1 and 3
    device 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    device 1: 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

As in interleaved 1F1B, a stage runs several micro-batches before the device turns to its next stage. I and W are
ordered as in ZB-H1. With one stage per device, the schedule is ZB-H1.
"""

from planner.core.schedule.base import Action
from planner.core.schedule.interleaved import Interleaved, actions_in_rounds
from planner.core.schedule.split_backward import alternating_order


class InterleavedZB(Interleaved):
    """Interleaved 1F1B with split backwards."""

    name = "interleaved-zb"
    title = "interleaved zero bubble"
    torch_name = "InterleavedZeroBubble"
    splits_backward = True
    one_stage_name = "zb-h1"

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the action order of torch's schedule, without idle slots."""
        stages = self.stages_on(device, num_devices, chunks)
        per_round = self.micro_batches_per_round(num_devices, micro_batches)
        return alternating_order(
            actions_in_rounds("F", stages, micro_batches, per_round),
            actions_in_rounds("I", stages[::-1], micro_batches, per_round),
            warm_up=min(chunks * micro_batches, (chunks - 1) * per_round + num_devices - 1 - device),
            lag=device,
        )
