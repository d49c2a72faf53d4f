"""One training step drawn out: what every device does when, and how much memory it holds meanwhile.

What pictures and traces are made of. Times are the simulator's; memory follows the moments that the peak is taken
over (`planner.core.cost.moments`), so that its highest point is the plan's peak.
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
"""What a device computes, by the label of its kind; or `send forward`, `send backward`, `receive`, `optimizer`.

Sends overlap with what their device computes; `receive`, over a link that blocks, keeps it busy.
"""

_BACKWARDS: Final = {kind.label for kind in KINDS.values() if kind.direction < 0}
"""The kinds in which activations are computed again."""
_LABELS: Final = {kind.label for kind in KINDS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that a device does."""

    kind: SpanKind
    device: int
    """Place in the pipeline; of a send the sender's."""
    stage: int
    """Place in the chain; of an optimizer's step the device's first stage."""
    micro_batch: int = 0
    start_us: float
    end_us: float
    recompute_us: float = 0.0
    """How much of a backward is computing activations again."""

    @property
    def duration_us(self) -> float:
        """From start to end."""
        return self.end_us - self.start_us


class Level(NamedTuple):
    """What a device holds from a time on."""

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
    """By start."""
    memory: tuple[tuple[Level, ...], ...]
    """Per device, by time."""

    @property
    def end_us(self) -> float:
        """When the last device is done, its optimizer's step included."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def pipeline_us(self) -> float:
        """When the last backward ends."""
        return max((span.end_us for span in self.spans if span.kind != "optimizer"), default=0.0)


def step_of(evaluation: Evaluation) -> Step:
    """Return one step of the partition, drawn out."""
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
    # The spans of a device come in the order of time.
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
        held = _Held.of(_stage_bytes(device, evaluation), counts, evaluation.cluster.reserve_bytes)
        peak = sum(evaluation.memory[k].total for k in evaluation.partition.chunks_of(device))
        levels.append(tuple(_levels(computing[device], held, peak)))
    return tuple(levels)


class _StageBytes(NamedTuple):
    """What a stage holds, in columns that are rounded one by one: the items of the plan, or a single one."""

    always: FloatArray
    """Shape (columns,)."""
    parts: FloatArray
    """Shape (parts, columns)."""

    def at(self, counts: IntArray) -> FloatArray:
        """Whole bytes at moments; counts have shape (moments, parts)."""
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


class _Held(NamedTuple):
    """Whole bytes of a device, the reserve included."""

    idle: int
    """Before the first action."""
    during: Sequence[int]
    """While each action runs."""
    after: Sequence[int]
    """Until the next one runs."""
    optimizer_step: int

    @classmethod
    def of(cls, stages: Sequence[_StageBytes], counts: Counts, reserve_bytes: int) -> "_Held":
        """The bytes of a device that runs `stages` with these counts."""

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


def _levels(computing: Sequence[Span], held: _Held, peak: int) -> Iterator[Level]:
    """Levels as they change; `peak` is the exact one, from which chunks differ by rounding."""
    yield Level(0.0, held.idle)
    ends = [*(after.start_us for _, after in pairwise(computing)), float("inf")]
    for n, (span, next_us) in enumerate(zip(computing, ends, strict=True)):
        yield Level(span.start_us, min(peak, held.during[n]))
        if next_us > span.end_us:
            yield Level(span.end_us, min(peak, held.after[n]))
    yield Level(computing[-1].end_us, min(peak, held.optimizer_step))
