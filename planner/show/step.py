"""One training step: time spans of every device's actions, and every device's memory over time.

Pictures and traces show these spans. Their times come from the simulator. The maximum of a device's memory over time
equals its peak memory in the plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.allocations import stage_memory_by_allocation
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.memory import single_stage_memory_table
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import AllocationCounts, allocation_counts, optimizer_step_counts
from planner.core.cost.simulate import Event, StageTimes
from planner.core.schedule import KINDS, Letter, sending_stage
from planner.core.schedule.kinds import ActionKind

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SpanKind = str
"""Kind of a span: the label of an action's kind; or `send forward`, `send backward`, `receive`, `optimizer`.

Sends overlap with computation. A `receive` is over a blocking link and keeps the device busy.
"""

BY_LABEL: Final[Mapping[str, ActionKind]] = {kind.label: kind for kind in KINDS.values()}
"""Kinds of action by label; spans have the label as their kind."""

REDONE: Final = frozenset(kind.label for kind in KINDS.values() if kind.direction < 0)
"""Labels of the kinds of action that may include recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Interval of time in which a device runs one action, transfer or optimizer step."""

    kind: SpanKind
    device: int
    """Index of the device in the pipeline; for a send, the sender."""
    stage: int
    """Index of the stage in the pipeline; for an optimizer step, the first stage of the device."""
    micro_batch: int = 0
    start_us: float
    end_us: float
    recompute_us: float = 0.0
    """Time of recomputation at the beginning of a backward."""

    @property
    def duration_us(self) -> float:
        """Time from start to end, in microseconds."""
        return self.end_us - self.start_us


class MemoryLevel(NamedTuple):
    """Memory of a device during an interval: from `start_us` to the start of the next `MemoryLevel`."""

    start_us: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One training step of a pipeline: actions and transfers of every device, and its memory over time."""

    num_devices: int
    """Number of devices of the pipeline, K."""
    chunks: int
    """Number of chunks (stages) per device, V. With K devices, stage s is chunk s // K of its device."""
    micro_batches: int
    """Number of micro-batches, M."""
    spans: tuple[Span, ...]
    """Spans of all devices, sorted by start."""
    memory: tuple[tuple[MemoryLevel, ...], ...]
    """Memory levels of each device, sorted by time."""

    @property
    def end_us(self) -> float:
        """End of the step, including the optimizer step, in microseconds."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def pipeline_us(self) -> float:
        """End of the last backward, in microseconds."""
        return max((span.end_us for span in self.spans if span.kind != "optimizer"), default=0.0)


def simulated_step(evaluation: Evaluation) -> StepTimeline:
    """Return one simulated training step of the evaluated partition."""
    partition = evaluation.partition
    spans = [span for event in evaluation.events for span in _spans(event, evaluation.stage_times, partition)]
    spans += _optimizer_spans(spans, evaluation)
    spans.sort(key=lambda span: (span.start_us, span.device, span.stage, span.micro_batch, span.kind))
    return StepTimeline(
        num_devices=partition.num_devices,
        chunks=partition.chunks,
        micro_batches=partition.micro_batches,
        spans=tuple(spans),
        memory=_memory(spans, evaluation),
    )


def _spans(event: Event, times: Sequence[StageTimes], partition: Partition) -> Iterator[Span]:
    stage, last = event.stage, event.micro_batch == partition.micro_batches - 1
    send, _, letter = event.kind.rpartition(" ")
    computed = KINDS[cast("Letter", letter)]
    kind = f"{send} {computed.label}".strip()
    source = None if send else sending_stage(computed.letter, stage, len(times))
    boundary = -1 if source is None else min(source, stage)
    if boundary >= 0 and partition.num_devices > 1 and times[boundary].blocking:
        yield Span(
            kind="receive",
            device=event.device,
            stage=stage,
            micro_batch=event.micro_batch,
            start_us=event.start_us - times[boundary].send_us,
            end_us=event.start_us,
        )
    again = times[stage].last_recompute_us if last else times[stage].recompute_us
    yield Span(
        kind=kind,
        device=event.device,
        stage=stage,
        micro_batch=event.micro_batch,
        start_us=event.start_us,
        end_us=event.end_us,
        recompute_us=again if kind in REDONE else 0.0,
    )


def _optimizer_spans(spans: Sequence[Span], evaluation: Evaluation) -> Iterator[Span]:
    # The spans of a device are sorted by time, so the last one of a device remains.
    last_backward = {span.device: span.end_us for span in spans if span.kind in BY_LABEL}
    for device, between_steps_us in enumerate(evaluation.between_steps_us.tolist()):
        end_us = last_backward[device]
        if between_steps_us > 0:
            yield Span(kind="optimizer", device=device, stage=device, start_us=end_us, end_us=end_us + between_steps_us)


def _memory(spans: Sequence[Span], evaluation: Evaluation) -> tuple[tuple[MemoryLevel, ...], ...]:
    computing: list[list[Span]] = [[] for _ in range(evaluation.partition.num_devices)]
    for span in spans:
        if span.kind in BY_LABEL:
            computing[span.device].append(span)
    levels = []
    for device, counts in enumerate(allocation_counts(evaluation.actions)):
        device_bytes = _DeviceBytes.of(_stage_bytes(device, evaluation), counts, evaluation.cluster.reserve_bytes)
        peak = sum(evaluation.memory[k].total for k in evaluation.partition.chunks_of(device))
        levels.append(tuple(_levels(computing[device], device_bytes, peak)))
    return tuple(levels)


class _StageBytes(NamedTuple):
    """Memory of a stage, in bytes."""

    always: FloatArray
    """Bytes that exist during the whole step, shape (components,)."""
    allocation_bytes: FloatArray
    """Bytes that exist only at some points in the step, shape (allocations, components)."""

    def at(self, counts: IntArray) -> FloatArray:
        # Each component is rounded separately to whole bytes, as in plan files.
        whole: FloatArray = np.rint(self.always + counts @ self.allocation_bytes).sum(axis=1)
        return whole


def _stage_bytes(device: int, evaluation: Evaluation) -> list[_StageBytes]:
    partition, schedule = evaluation.partition, evaluation.partition.schedule_object
    if not schedule.has_known_peak_points:
        chunks = [evaluation.chunk_memories[k] for k in partition.chunks_of(device)]
        return [_StageBytes(np.array([float(chunk.always.total)]), chunk.allocation_bytes[:, None]) for chunk in chunks]
    stages, recompute = single_stage_memory_table(
        evaluation.costs.of_replicas(partition.replicas),
        *partition.intervals()[device],
        micro_batches=partition.micro_batches,
        recompute=partition.recompute[device],
        recomputed=partition.recomputed_in(device),
    )
    in_flight = schedule.in_flight(device, partition.num_devices, partition.micro_batches)
    return [_StageBytes(*stage_memory_by_allocation(stages, recompute, in_flight=in_flight).one_stage_by_component())]


class _DeviceBytes(NamedTuple):
    idle: int
    """Memory before the first action."""
    during: Sequence[int]
    """Memory while each action runs."""
    after: Sequence[int]
    """Memory between each action and the next one."""
    optimizer_step: int
    """Memory during the optimizer step."""

    @classmethod
    def of(cls, stages: Sequence[_StageBytes], counts: AllocationCounts, reserve_bytes: int) -> "_DeviceBytes":
        def at(moments: IntArray) -> FloatArray:
            sizes: FloatArray = np.array([stage.at(moments[:, v]) for v, stage in enumerate(stages)])
            total: FloatArray = sizes.sum(axis=0) + reserve_bytes
            return total

        during = np.maximum(at(counts.during), at(counts.sending))
        return cls(
            idle=int(at(np.zeros_like(counts.during[:1]))[0]),
            during=during.astype(int).tolist(),
            after=np.minimum(during, at(counts.after)).astype(int).tolist(),
            optimizer_step=int(at(optimizer_step_counts(counts.during.shape[1])).max()),
        )


def _levels(computing: Sequence[Span], device_bytes: _DeviceBytes, peak: int) -> Iterator[MemoryLevel]:
    # `peak` is exact. The sum of the rounded memory of several stages may be larger.
    yield MemoryLevel(0.0, device_bytes.idle)
    ends = [*(after.start_us for _, after in pairwise(computing)), float("inf")]
    for n, (span, next_us) in enumerate(zip(computing, ends, strict=True)):
        yield MemoryLevel(span.start_us, min(peak, device_bytes.during[n]))
        if next_us > span.end_us:
            yield MemoryLevel(span.end_us, min(peak, device_bytes.after[n]))
    yield MemoryLevel(computing[-1].end_us, min(peak, device_bytes.optimizer_step))


def memory_over_time(step: StepTimeline, *, columns: int, end_us: float) -> list[list[int]]:
    """Return each device's highest memory in bytes, in each of `columns` equal intervals of time.

    Args:
        step: The step.
        columns: Number of intervals from 0 to `end_us`.
        end_us: End of the last interval in microseconds, above 0.
    """
    return [_highest(levels, columns, end_us) for levels in step.memory]


def _highest(levels: Sequence[MemoryLevel], columns: int, end_us: float) -> list[int]:
    highest = [0] * columns
    ends = [*(after.start_us for _, after in pairwise(levels)), end_us]
    for level, until_us in zip(levels, ends, strict=True):
        # A level without duration still counts in its interval.
        first = int(level.start_us / end_us * columns)
        last = max(first + 1, ceil(min(until_us, end_us) / end_us * columns - 1e-9))
        for column in range(first, min(last, columns)):
            highest[column] = max(highest[column], level.bytes)
    return highest
