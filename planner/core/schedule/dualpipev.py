"""DualPipeV: one half of DeepSeek's DualPipe (arXiv:2412.19437), placed as a V; torch's `ScheduleDualPipeV`.

    K = 2, M = 4, stages 0 and 3, 1 and 2
    device 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    device 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

DualPipeV overlaps a forward and a backward of two micro-batches to hide communication. This module runs the forward
first, then the backward. Most backwards are whole. Split backwards are used while the pipeline fills and drains.
"""

from planner.core.errors import UsageError
from planner.core.schedule.base import Action
from planner.core.schedule.split_backward import DOWN, UP, OrderBuilder, VSchedule


class DualPipeV(VSchedule):
    """Schedule with two stages per device, which alternates forwards of one stage with backwards of the other."""

    name = "dualpipev"
    title = "DualPipeV"
    torch_name = "DualPipeV"

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the action order of torch's schedule. Passes that torch overlaps run one after the other."""
        behind = num_devices - 1 - device
        row = OrderBuilder(self.stages_on(device, num_devices, chunks), micro_batches)
        for _ in range(2 * behind):
            row.add_forward(DOWN)
        for _ in range(device + 1):
            row.add_forward(DOWN)
            row.add_forward(UP)
        for _ in range(behind):
            row.add_input_backward(UP)
            row.add_weight_backward()
            row.add_forward(UP)
        for _ in range(micro_batches - 2 * num_devices + device + 1):
            _pair(row, DOWN, UP)
            _pair(row, UP, DOWN)
        for _ in range(behind):
            row.add_backward(UP)
            _pair(row, UP, DOWN)
        self._drain(row, device, behind)
        return tuple(row.actions)

    def check_supported(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raise UsageError if there are fewer micro-batches than stages. torch rejects this, too."""
        super().check_supported(num_devices, micro_batches, chunks)
        if micro_batches < 2 * num_devices:
            raise UsageError(
                f"{self.title} needs at least as many micro-batches as stages, got M = {micro_batches}, "
                f"{2 * num_devices} stages",
                hint="use `--schedule zbv`, a larger `--batch`, or fewer devices",
            )

    def most_devices(self, micro_batches: int) -> int:
        """Return half of `micro_batches`: DualPipeV needs as many micro-batches as stages, two per device."""
        return micro_batches // 2

    @staticmethod
    def _drain(row: OrderBuilder, device: int, behind: int) -> None:
        whole = device + 1
        for place in range(2 * (device + 1)):
            chunk = DOWN if place % 2 else UP
            if place < whole:
                row.add_backward(chunk)
            else:
                row.add_input_backward(chunk)
        for _ in range(behind):
            row.add_weight_backward()
            row.add_input_backward(DOWN)
        for _ in range(device + 1):
            row.add_weight_backward()


def _pair(row: OrderBuilder, forward: int, backward: int) -> None:
    row.add_forward(forward)
    row.add_backward(backward)
