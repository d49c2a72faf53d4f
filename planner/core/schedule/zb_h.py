"""ZB-H1 and ZB-H2: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241), section 2.

Both are 1F1B with deferred weight gradients; later stages defer more. Input gradients reach the first stage sooner, and
the deferred W passes fill the end of the step.

Stage i = 0 … K-1 stores at most this number of micro-batches:

              from F to I (1F1B: B)    from I to W    total
    1F1B      K-i                      -              K-i
    ZB-H1     K-i                      i              K
    ZB-H2     2(K-i)-1                 2i             2K-1

Under ZB-H2, if F = I = W and there are at least 2K-1 micro-batches, a device is idle only before its first and after
its last action.
"""

from typing import ClassVar

from planner.core.schedule.base import Action, Schedule
from planner.core.schedule.split_backward import alternating_order


class ZBH1(Schedule):
    """1F1B with split backwards. No device stores more micro-batches than the first device of 1F1B.

    K = 2, M = 3
    device 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    device 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """

    name = "zb-h1"
    title = "ZB-H1"
    torch_name = ""
    splits_backward = True
    passes_per_stage: ClassVar[int] = 1  # number n: stage i has n * (K-1-i) warm-up forwards, and defers n * i W

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the warm-up forwards, then F, I and a deferred W in turn, then the remaining W."""
        return alternating_order(
            [Action(device, "F", i) for i in range(micro_batches)],
            [Action(device, "I", i) for i in range(micro_batches)],
            warm_up=self.passes_per_stage * (num_devices - 1 - device),
            lag=self.passes_per_stage * device,
        )


class ZBH2(ZBH1):
    """1F1B with split backwards and about twice as many warm-up forwards.

    K = 2, M = 4
    device 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    device 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """

    name = "zb-h2"
    title = "ZB-H2"
    passes_per_stage = 2
