"""ZB-H2: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241), section 2.

    K = 2, M = 4
    device 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    device 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

ZB-H2 has about twice as many warm-up forwards and twice as many deferred W passes as ZB-H1. If F = I = W and M is at
least 2K-1, a device is idle only before its first and after its last action. Stage i, counted from 0, stores 2(K-i)-1
micro-batches before their I and 2i more before their W. The sum is nearly twice what the first stage stores under 1F1B.
"""

from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.halves import alternating_order


class ZBH2(Schedule):
    """1F1B with split backwards and about twice as many warm-up forwards."""

    name = "zb-h2"
    title = "ZB-H2"
    torch_name = ""
    splits_backward = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the order of ZB-H1 with about twice as many warm-up forwards and twice as many deferred W passes."""
        return alternating_order(
            [Action(device, "F", i) for i in range(micro_batches)],
            [Action(device, "I", i) for i in range(micro_batches)],
            warm_up=2 * (num_devices - 1 - device),
            lag=2 * device,
        )
