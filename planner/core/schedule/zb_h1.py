"""ZB-H1: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241), section 2.

    K = 2, M = 3
    device 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    device 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

1F1B with deferred weight gradients; later stages defer more. Input gradients reach the first stage sooner, and the
deferred W passes fill the end of the step. Stage i, counted from 0, stores K-i micro-batches before their I and i more
before their W. The sum, K, is what the first stage stores under 1F1B.
"""

from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.halves import alternating_order


class ZBH1(Schedule):
    """1F1B with split backwards, which needs no more memory than 1F1B."""

    name = "zb-h1"
    title = "ZB-H1"
    torch_name = ""
    splits_backward = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the order of 1F1B with split backwards; on device i, the W passes of i micro-batches are deferred."""
        return alternating_order(
            [Action(device, "F", i) for i in range(micro_batches)],
            [Action(device, "I", i) for i in range(micro_batches)],
            warm_up=num_devices - 1 - device,
            lag=device,
        )
