"""Input of the search for an action order: stages with their times and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.core.cost.arrays import FloatArray
from planner.core.cost.peak_points import ALLOCATIONS, BACKWARDS, FORWARDS, INPUT_BACKWARDS, WEIGHT_BACKWARDS
from planner.core.cost.simulate import StageTimes
from planner.core.schedule import Letter


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


class Route(NamedTuple):
    """Receiver and link of a stage's results, for one direction."""

    device: int
    """Device of the receiving stage."""
    link: int
    """Index of the link; -1 if the receiving stage is on the sender's device."""
    send_us: float
    blocking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationTables:
    """Times, links and memory of stages in the form that list scheduling reads."""

    first_device: int
    """Device of stage 0."""
    durations_us: Mapping[Letter, Sequence[float]]
    """Duration of each kind of action, for each stage."""
    last_durations_us: Mapping[Letter, Sequence[float]]
    """Duration of the backwards of the last micro-batch, for each stage."""
    saved_us: Sequence[float]
    """For each stage, time that a whole backward (B) saves over a split one (I and W), which is I + W - B.

    The value is 0 for stages whose backwards are all whole.
    """
    last_saved_us: Sequence[float]
    """For each stage, time that a whole backward (B) of the last micro-batch saves over a split one (I and W).

    The value is 0 for stages whose backwards are all whole.
    """
    down: Sequence[Route]
    """Route from each stage to the next one; from the last stage to itself."""
    up: Sequence[Route]
    """Route from each stage to the previous one; from stage 0 to itself."""
    held_bytes: Sequence[float]
    """Memory of a micro-batch on each stage from its forward to its backward or input-gradient pass (I)."""
    deferred_bytes: Sequence[float]
    """Memory of a micro-batch on each stage between its input-gradient (I) and its weight-gradient pass (W)."""
    spare_bytes: Sequence[float]
    """Memory that each stage's device must have left to start a forward of the stage."""
    free_bytes: Sequence[float]
    """Memory of each device for micro-batches."""
    busy_us: Sequence[float]
    """Time that each device is busy in a step, including all-reduces and the optimizer."""


@dataclass(frozen=True, kw_only=True)
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
    """Memory limit of each device minus its reserve, in bytes."""
    between_steps_us: tuple[float, ...]
    """Time of optimizer steps and all-reduces after the last action of each device."""

    @cached_property
    def tables(self) -> SimulationTables:
        """Tables for list scheduling, computed on first use."""
        times, footprints, num_devices = self.times, self.footprints, len(self.stages_by_device)
        devices = {stage: device for device, stages in enumerate(self.stages_by_device) for stage in stages}

        def route(stage: int, other: int) -> Route:
            device, to = devices[stage], devices[other]
            link = -1 if device == to else device * num_devices + to
            boundary = times[min(stage, other)]
            return Route(to, link, boundary.send_us, boundary.blocking)

        durations: dict[Letter, Sequence[float]] = {
            "F": [t.forward_us for t in times],
            "B": [t.backward_us for t in times],
            "I": [t.input_backward_us for t in times],
            "W": [t.weight_backward_us for t in times],
        }
        last: dict[Letter, Sequence[float]] = {
            "B": [t.last_backward_us for t in times],
            "I": [t.last_input_backward_us for t in times],
        }
        saved, last_saved = (
            [
                0.0 if is_whole else input_us + t.weight_backward_us - whole_us
                for is_whole, t, input_us, whole_us in zip(self.is_whole, times, each["I"], each["B"], strict=True)
            ]
            for each in (durations, last)
        )
        # Memory for the largest running action and for one micro-batch of each later chunk is reserved. Otherwise the
        # first chunk could fill the device with micro-batches that can never continue.
        held = [max(footprint.held, footprint.between) for footprint in footprints]
        return SimulationTables(
            first_device=devices[0],
            durations_us=durations,
            last_durations_us=last,
            saved_us=saved,
            last_saved_us=last_saved,
            down=[route(stage, min(stage + 1, len(times) - 1)) for stage in range(len(times))],
            up=[route(stage, max(0, stage - 1)) for stage in range(len(times))],
            held_bytes=held,
            deferred_bytes=[footprint.between for footprint in footprints],
            spare_bytes=[
                held[stage] + sum(held[other] for other in self.stages_by_device[devices[stage]] if other > stage)
                for stage in range(len(times))
            ],
            free_bytes=[
                limit - sum(footprints[s].always for s in stages) - max(footprints[s].above for s in stages)
                for limit, stages in zip(self.limits_bytes, self.stages_by_device, strict=True)
            ],
            busy_us=[self.busy_us(device) for device in range(num_devices)],
        )

    def busy_us(self, device: int) -> float:
        """Return the time that a device is busy in a step, including all-reduces and the optimizer."""
        total_us, more = self.between_steps_us[device], self.micro_batches - 1
        for stage in self.stages_by_device[device]:
            times = self.times[stage]
            total_us += self.micro_batches * times.forward_us
            if self.is_whole[stage]:
                total_us += more * times.backward_us + times.last_backward_us
            else:
                total_us += more * times.input_backward_us + times.last_input_backward_us
                total_us += self.micro_batches * times.weight_backward_us
        return total_us


def approximate_stage_memory(
    permanent_bytes: float, allocation_bytes: FloatArray, *, is_whole: bool
) -> ApproximateStageMemory:
    """Return the approximate memory of a stage, with whole backwards if `is_whole`, else with split backwards.

    Args:
        permanent_bytes: Bytes that are allocated during the whole step.
        allocation_bytes: Bytes of each of `planner.core.cost.peak_points.ALLOCATIONS`.
        is_whole: True if the stage runs whole backwards (B); False if it runs I and W.
    """
    size = dict(zip(ALLOCATIONS, allocation_bytes.tolist(), strict=True))
    held = max(size["held"], size["kept"])
    between = 0.0 if is_whole else size["weight_held"]
    backwards = (*BACKWARDS, "message") if is_whole else INPUT_BACKWARDS
    running = max(size[name] for name in (*FORWARDS, *backwards))
    weight = 0.0 if is_whole else max(size[name] for name in (*WEIGHT_BACKWARDS, "weight_message"))
    transfers = size["input"] + size["output_gradient"] + size["input_gradient"]
    return ApproximateStageMemory(
        always=permanent_bytes + size["gradients"] + size["casts"] + transfers,
        held=held,
        between=between,
        above=max(0.0, running - held, weight - between),
    )
