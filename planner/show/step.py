"""One training step as spans of time: the actions of every device, and the memory that it holds.

Pictures and traces are made of it. Times are the simulator's. Memory is taken at the same points as the peak
(`planner.core.cost.moments`), so its highest value is the plan's peak.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.memory import one_stage
from planner.core.cost.moments import Counts, counts_of, optimizer_steps
from planner.core.cost.partition import Partition
from planner.core.cost.parts import parts_of
from planner.core.cost.simulate import Event, StageTimes
from planner.core.schedule import KINDS, Letter, message_from

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SpanKind = str
"""Kind of a span: the label of an action's kind; or `send forward`, `send backward`, `receive`, `optimizer`.

Sends overlap with computation; `receive`, over a blocking link, keeps the device busy.
"""

_BACKWARDS: Final = {kind.label for kind in KINDS.values() if kind.direction < 0}
"""Kinds that include recomputation."""
_LABELS: Final = {kind.label for kind in KINDS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Interval of time in which a device does one thing."""

    kind: SpanKind
    device: int
    """Index of the device in the pipeline; for a send, of the sender."""
    stage: int
    """Index of the stage in the pipeline; for an optimizer's step, the device's first stage."""
    micro_batch: int = 0
    start_us: float
    end_us: float
    recompute_us: float = 0.0
    """Part of a backward that is recomputation."""

    @property
    def duration_us(self) -> float:
        """Time from start to end."""
        return self.end_us - self.start_us


class Level(NamedTuple):
    """Memory of a device from a point in time."""

    start_us: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one pipeline."""

    num_devices: int
    """K."""
    chunks: int
    """V: stage s is chunk s // K of its device."""
    micro_batches: int
    spans: tuple[Span, ...]
    """Spans in order of their starts."""
    memory: tuple[tuple[Level, ...], ...]
    """Levels of each device, in order of time."""

    @property
    def end_us(self) -> float:
        """End of the last device's work, including its optimizer's step."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def pipeline_us(self) -> float:
        """End of the last backward."""
        return max((span.end_us for span in self.spans if span.kind != "optimizer"), default=0.0)


def step_of(evaluation: Evaluation) -> Step:
    """Return one step of the partition as spans."""
    partition = evaluation.partition
    spans = [span for event in evaluation.events for span in _spans(event, evaluation.stage_times, partition)]
    spans += _optimizer_spans(spans, evaluation)
    spans.sort(key=lambda span: (span.start_us, span.device, span.stage, span.micro_batch, span.kind))
    return Step(
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
    source = None if send else message_from(computed.letter, stage, len(times))
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
        recompute_us=again if kind in _BACKWARDS else 0.0,
    )


def _optimizer_spans(spans: Sequence[Span], evaluation: Evaluation) -> Iterator[Span]:
    # The spans of a device are in order of time.
    last_backward = {span.device: span.end_us for span in spans if span.kind in _LABELS}
    for device, own_us in enumerate(evaluation.updates_us.tolist()):
        end_us = last_backward[device]
        if own_us > 0:
            yield Span(kind="optimizer", device=device, stage=device, start_us=end_us, end_us=end_us + own_us)


def _memory(spans: Sequence[Span], evaluation: Evaluation) -> tuple[tuple[Level, ...], ...]:
    computing: list[list[Span]] = [[] for _ in range(evaluation.partition.num_devices)]
    for span in spans:
        if span.kind in _LABELS:
            computing[span.device].append(span)
    levels = []
    for device, counts in enumerate(counts_of(evaluation.actions)):
        device_bytes = _DeviceBytes.of(_stage_bytes(device, evaluation), counts, evaluation.cluster.reserve_bytes)
        peak = sum(evaluation.memory[k].total for k in evaluation.partition.chunks_of(device))
        levels.append(tuple(_levels(computing[device], device_bytes, peak)))
    return tuple(levels)


class _StageBytes(NamedTuple):
    """Bytes of a stage in columns that are rounded one by one: the plan's components, or a single column."""

    always: FloatArray
    """Bytes that are always held, shape (columns,)."""
    parts: FloatArray
    """Bytes of each counted part, shape (parts, columns)."""

    def at(self, counts: IntArray) -> FloatArray:
        """Return whole bytes at points in the step; counts have shape (points, parts)."""
        whole: FloatArray = np.rint(self.always + counts @ self.parts).sum(axis=1)
        return whole


def _stage_bytes(device: int, evaluation: Evaluation) -> list[_StageBytes]:
    partition, schedule = evaluation.partition, evaluation.partition.rule
    if not schedule.has_known_moments:
        chunks = [evaluation.chunks[k] for k in partition.chunks_of(device)]
        return [_StageBytes(np.array([float(chunk.always.total)]), chunk.parts[:, None]) for chunk in chunks]
    stages, recompute = one_stage(
        evaluation.costs.of_replicas(partition.replicas),
        *partition.intervals()[device],
        micro_batches=partition.micro_batches,
        recompute=partition.recompute[device],
        recomputed=partition.recomputed_in(device),
    )
    in_flight = schedule.in_flight(device, partition.num_devices, partition.micro_batches)
    return [_StageBytes(*parts_of(stages, recompute, in_flight=in_flight).of_one_stage())]


class _DeviceBytes(NamedTuple):
    """Whole bytes of a device, including the reserve."""

    idle: int
    """Bytes before the first action."""
    during: Sequence[int]
    """Bytes while each action runs."""
    after: Sequence[int]
    """Bytes between each action and the next."""
    optimizer_step: int

    @classmethod
    def of(cls, stages: Sequence[_StageBytes], counts: Counts, reserve_bytes: int) -> "_DeviceBytes":
        """Return the bytes of a device that runs `stages` with these counts.

        Args:
            stages: Bytes of the stages.
            counts: Counts of the parts at each action.
            reserve_bytes: Reserve of the device.

        Returns:
            The bytes over the step.
        """

        def at(moments: IntArray) -> FloatArray:
            sizes: FloatArray = np.array([stage.at(moments[:, v]) for v, stage in enumerate(stages)])
            total: FloatArray = sizes.sum(axis=0) + reserve_bytes
            return total

        during = np.maximum(at(counts.during), at(counts.message))
        return cls(
            idle=int(at(np.zeros_like(counts.during[:1]))[0]),
            during=during.astype(int).tolist(),
            after=np.minimum(during, at(counts.after)).astype(int).tolist(),
            optimizer_step=int(at(optimizer_steps(counts.during.shape[1])).max()),
        )


def _levels(computing: Sequence[Span], device_bytes: _DeviceBytes, peak: int) -> Iterator[Level]:
    """Yield the changes of memory; `peak` is exact, and levels of several chunks may exceed it by rounding."""
    yield Level(0.0, device_bytes.idle)
    ends = [*(after.start_us for _, after in pairwise(computing)), float("inf")]
    for n, (span, next_us) in enumerate(zip(computing, ends, strict=True)):
        yield Level(span.start_us, min(peak, device_bytes.during[n]))
        if next_us > span.end_us:
            yield Level(span.end_us, min(peak, device_bytes.after[n]))
    yield Level(computing[-1].end_us, min(peak, device_bytes.optimizer_step))
