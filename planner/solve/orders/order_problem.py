"""Input of the search for an action order: stages with their times and memory."""

from dataclasses import dataclass
from typing import NamedTuple

from planner.core.cost.arrays import FloatArray
from planner.core.cost.peak_points import BACKWARDS, FORWARDS, INPUT_BACKWARDS, PARTS, WEIGHT_BACKWARDS
from planner.core.cost.simulate import StageTimes


class ApproximateStageMemory(NamedTuple):
    """Approximate memory of a stage, in bytes."""

    always: float
    """Permanent memory: parameters, gradients and transfer buffers."""
    held: float
    """Memory of one micro-batch between its forward and its input-gradient pass (I)."""
    between: float
    """Memory of one micro-batch between its input-gradient pass (I) and its weight-gradient pass (W)."""
    above: float
    """Largest additional memory of a running action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """Stages whose action order is searched, with their devices, times and memory."""

    stages_by_device: tuple[tuple[int, ...], ...]
    """Indices of the stages of each device, ascending."""
    micro_batches: int
    """Number of micro-batches, M."""
    times: tuple[StageTimes, ...]
    """Times of each stage."""
    footprints: tuple[ApproximateStageMemory, ...]
    """Memory of each stage."""
    is_whole: tuple[bool, ...]
    """True for stages with whole backwards (B); False for stages with split backwards (I and W)."""
    limits_bytes: tuple[float, ...]
    """Memory limit of each device."""
    own_us: tuple[float, ...]
    """Time of optimizer steps and all-reduces on each device, as if they all followed the device's last action."""

    def busy_us(self, device: int) -> float:
        """Return the time that a device is busy in a step: its actions, all-reduces and optimizer steps."""
        total_us, more = self.own_us[device], self.micro_batches - 1
        for stage in self.stages_by_device[device]:
            times = self.times[stage]
            total_us += self.micro_batches * times.forward_us
            if self.is_whole[stage]:
                total_us += more * times.backward_us + times.last_backward_us
            else:
                total_us += more * times.input_backward_us + times.last_input_backward_us
                total_us += self.micro_batches * times.weight_backward_us
        return total_us


def approximate_stage_memory(always: float, parts: FloatArray, *, is_whole: bool) -> ApproximateStageMemory:
    """Return the approximate memory of a stage.

    Args:
        always: Permanent bytes.
        parts: Bytes of each of `planner.core.cost.peak_points.PARTS`.
        is_whole: True if the stage runs whole backwards (B); False if it runs I and W.
    """
    part = dict(zip(PARTS, parts.tolist(), strict=True))
    held = max(part["held"], part["kept"])
    between = 0.0 if is_whole else part["weight_held"]
    backwards = (*BACKWARDS, "message") if is_whole else INPUT_BACKWARDS
    running = max(part[name] for name in (*FORWARDS, *backwards))
    weight = 0.0 if is_whole else max(part[name] for name in (*WEIGHT_BACKWARDS, "weight_message"))
    transfers = part["input"] + part["output_gradient"] + part["input_gradient"]
    return ApproximateStageMemory(
        always=always + part["gradients"] + part["casts"] + transfers,
        held=held,
        between=between,
        above=max(0.0, running - held, weight - between),
    )
