"""GPipe (Huang et al. 2019, arXiv:1811.06965): all forwards, then all backwards.

    K = 2, M = 3 (`1F2` is the forward of micro-batch 2 on stage 1)
    device 0: 0F0 0F1 0F2 0B0 0B1 0B2
    device 1: 1F0 1F1 1F2 1B0 1B1 1B2

In the paper, backwards run in reverse order. In torch's `ScheduleGPipe` and in this module, backwards have the order
of the forwards.
"""

from math import inf

from planner.core.schedule.base import Action, ComputeTimeBounds, Schedule


class GPipe(Schedule):
    """Schedule of all forwards, then all backwards in the same order."""

    name = "gpipe"
    title = "GPipe"
    torch_name = "GPipe"
    is_forwards_first = True
    has_closed_form = True
    has_known_peak_points = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return all forwards, then all backwards, in the same order."""
        forwards = tuple(Action(device, "F", i) for i in range(micro_batches))
        return (*forwards, *(Action(device, "B", i) for i in range(micro_batches)))

    def in_flight(self, device: int, num_devices: int, micro_batches: int) -> int:
        """Return `micro_batches`: all are in flight after the last forward."""
        return micro_batches

    def bound_us(self, bounds: ComputeTimeBounds, micro_batches: int, chunks: int) -> float:
        """Return a lower bound of the step time of every partition, in microseconds."""
        return bounds.work_us + (micro_batches - 1) * (bounds.forward_us + bounds.backward_us)

    def stage_time_limit_us(self, upper_us: float, work_us: float, micro_batches: int) -> float:
        """Return an upper bound of a stage's forward plus backward time, in plans with a shorter step than `upper_us`.

        `work_us` is the forward plus backward time of a micro-batch in all stages. All times are in microseconds.
        """
        return inf if micro_batches == 1 else max(0.0, upper_us - work_us) / (micro_batches - 1)
