"""1F1B: Narayanan et al. 2019 (PipeDream), 2021 (PipeDream-Flush, arXiv:2006.09503).

    K = 2, M = 3
    device 0: 0F0 0F1 0B0 0F2 0B1 0B2
    device 1: 1F0 1B0 1F1 1B1 1F2 1B2

Stage k warms up with K-k forwards: one for itself and one for every later stage. Then it alternates one forward with
the backward of the oldest micro-batch in flight.
"""

from itertools import zip_longest

from planner.core.errors import UsageError
from planner.core.schedule.base import Action, Schedule


class OneForwardOneBackward(Schedule):
    """Schedule of warm-up forwards, then a backward and a forward in turn, then the remaining backwards."""

    name = "1f1b"
    title = "1F1B"
    torch_name = "1F1B"
    has_known_peak_points = True
    is_one_forward_one_backward = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return the warm-up forwards, then a backward and a forward in turn, then the remaining backwards."""
        warm_up = self.in_flight(device, num_devices, micro_batches)
        forwards = [Action(device, "F", i) for i in range(micro_batches)]
        backwards = [Action(device, "B", i) for i in range(micro_batches)]
        actions = forwards[:warm_up]
        for backward, forward in zip_longest(backwards, forwards[warm_up:]):
            actions += (backward,) if forward is None else (backward, forward)
        return tuple(actions)

    def check_supported(self, num_devices: int, micro_batches: int, chunks: int) -> None:
        """Raise UsageError if there are fewer micro-batches than devices. torch rejects this, too."""
        super().check_supported(num_devices, micro_batches, chunks)
        if micro_batches < num_devices:
            raise UsageError(
                f"1F1B needs at least as many micro-batches as stages, got M = {micro_batches}, K = {num_devices}",
                hint="use `--schedule gpipe`, a larger `--batch`, or fewer devices",
            )

    def most_devices(self, micro_batches: int) -> int:
        """Return `micro_batches`: there must be at least as many micro-batches as devices."""
        return micro_batches

    def in_flight(self, device: int, num_devices: int, micro_batches: int) -> int:
        """Return the number of warm-up forwards: one for the stage itself, and one for every later stage."""
        return min(micro_batches, num_devices - device)
