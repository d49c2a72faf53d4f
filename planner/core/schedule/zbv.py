"""ZB-V: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241), section 6.

    K = 2, M = 3, stages 0 and 3, 1 and 2
    device 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    device 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

The stages are placed as a V: the first device has the first and the last stage. All devices need as much memory as the
first device under 1F1B. Without transfers and with F = I = W on all stages, no device is idle between its first and
last action, if M is at least 2K-1. The orders equal those of torch's `ScheduleZBVZeroBubble`.
"""

from planner.core.schedule.base import Action
from planner.core.schedule.split_backward import DOWN, UP, OrderBuilder, VSchedule


class ZBV(VSchedule):
    """Zero-bubble schedule with two stages per device, placed as a V."""

    name = "zbv"
    title = "ZB-V"
    torch_name = "ZBVZeroBubble"

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return warm-up passes of both stages, then F, I, W of the stages in turn, then the remaining I and W."""
        behind = num_devices - device
        row = OrderBuilder(self.stages_on(device, num_devices, chunks), micro_batches)
        for _ in range(2 * behind - 1):
            row.add_forward(DOWN)
        for _ in range(device):
            row.add_forward(UP)
            row.add_forward(DOWN)
        for _ in range(behind):
            _pass(row, UP)
        for _ in range(max(num_devices - 1, micro_batches - num_devices)):
            _pass(row, DOWN)
            _pass(row, UP)
        for _ in range(device):
            row.add_input_backward(DOWN)
            row.add_input_backward(UP)
        for _ in range(behind):
            row.add_input_backward(DOWN)
            row.add_weight_backward(DOWN)
        for chunk in (UP, DOWN):
            for _ in range(device):
                row.add_weight_backward(chunk)
        return tuple(row.actions)


def _pass(row: OrderBuilder, chunk: int) -> None:
    row.add_forward(chunk)
    row.add_input_backward(chunk)
    row.add_weight_backward(chunk)
