"""Points in the step by the number of micro-batches in flight."""

from planner.core.cost.peak_points import PeakPoints, stage_peak_points
from planner.core.schedule import GPIPE, ONE_FORWARD_ONE_BACKWARD


def peak_points_with(micro_batches: int, in_flight: int | None = None) -> PeakPoints:
    """Return GPipe's points, or 1F1B's if fewer micro-batches are in flight than there are."""
    if in_flight in (None, micro_batches):
        return stage_peak_points(GPIPE, micro_batches=micro_batches)
    assert in_flight is not None
    return stage_peak_points(ONE_FORWARD_ONE_BACKWARD, micro_batches=micro_batches, num_later=in_flight - 1)
