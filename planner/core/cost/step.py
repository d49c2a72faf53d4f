"""One training step drawn out: what every device does when, and how much memory it holds meanwhile.

What pictures and traces are made of. Times are the simulator's; memory follows the moments that the peak is taken
over (`planner.core.cost.memory`, `planner.core.cost.device_memory`), so that its highest point is the plan's peak.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from planner.core.cost.costs import ChainCosts
from planner.core.cost.device_memory import counts_of, moments_of
from planner.core.cost.evaluate import Partition, chunks_on, own_step_us, stage_times, stages_of, timeline
from planner.core.cost.memory import StageMoments, stage_moments
from planner.core.cost.simulate import Event, StageTimes
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Cluster

__all__ = ["Level", "Span", "SpanKind", "Step", "step_of"]

SpanKind = Literal["forward", "backward", "send forward", "send backward", "receive", "optimizer"]
"""Sends overlap with what their device computes; `receive`, over a link that blocks, keeps it busy."""


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
    """V: stage s is chunk s // K of device s % K."""
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


def step_of(costs: ChainCosts, partition: Partition, cluster: Cluster) -> Step:
    """The step that `partition` makes of the chain on `cluster`."""
    times = stage_times(costs, partition, cluster)
    spans = [span for event in timeline(costs, partition, cluster) for span in _spans(event, times, partition)]
    spans += _optimizer_spans(spans, costs, partition, cluster)
    spans.sort(key=lambda span: (span.start_us, span.device, span.stage, span.micro_batch, span.kind))
    return Step(
        num_devices=partition.num_devices,
        chunks=partition.chunks,
        micro_batches=partition.micro_batches,
        spans=tuple(spans),
        memory=_memory(spans, costs, partition, cluster),
    )


def _spans(event: Event, times: Sequence[StageTimes], partition: Partition) -> Iterator[Span]:
    stage, last = event.stage, event.micro_batch == partition.micro_batches - 1
    kinds: dict[str, SpanKind] = {
        "F": "forward",
        "B": "backward",
        "send F": "send forward",
        "send B": "send backward",
    }
    kind = kinds[event.kind]
    boundary = stage - 1 if kind == "forward" else stage
    crosses = partition.num_devices > 1 and 0 <= boundary < len(times) - 1
    if kind in ("forward", "backward") and crosses and times[boundary].blocking:
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
        recompute_us=again if kind == "backward" else 0.0,
    )


def _optimizer_spans(
    spans: Sequence[Span], costs: ChainCosts, partition: Partition, cluster: Cluster
) -> Iterator[Span]:
    intervals, count = partition.intervals(), partition.num_devices
    # The spans of a device come in the order of time.
    last_backward = {span.device: span.end_us for span in spans if span.kind == "backward"}
    for device in range(count):
        own_us = sum(
            own_step_us(costs, *intervals[k], cluster, device=partition.device_of(k), replicas=partition.replicas)
            for k in range(device, len(intervals), count)
        )
        end_us = last_backward[device]
        if own_us > 0:
            yield Span(kind="optimizer", device=device, stage=device, start_us=end_us, end_us=end_us + own_us)


class _Held(NamedTuple):
    """Bytes of a device while it computes, and behind that."""

    during: int
    after: int


def _memory(
    spans: Sequence[Span], costs: ChainCosts, partition: Partition, cluster: Cluster
) -> tuple[tuple[Level, ...], ...]:
    stages, count = stages_of(costs, partition, cluster), partition.num_devices
    computing: list[list[Span]] = [[] for _ in range(count)]
    for span in spans:
        if span.kind in ("forward", "backward"):
            computing[span.device].append(span)
    levels = []
    for device in range(count):
        law: _StageLaw | _ChunkLaw
        if SCHEDULES[partition.schedule].is_chunked:
            law = _ChunkLaw(costs, partition, device, cluster.reserve_bytes)
        else:
            law = _StageLaw(costs, partition, device, cluster.reserve_bytes)
        peak = sum(stage.memory.total for stage in stages[device::count])
        levels.append(tuple(_levels(computing[device], law, peak)))
    return tuple(levels)


def _levels(computing: Sequence[Span], law: "_StageLaw | _ChunkLaw", peak: int) -> Iterator[Level]:
    """Levels as they change; `peak` is the exact one, from which chunks differ by rounding."""
    yield Level(0.0, law.idle)
    ends = [*(after.start_us for _, after in pairwise(computing)), float("inf")]
    for span, next_us in zip(computing, ends, strict=True):
        held = law.hold(span)
        yield Level(span.start_us, min(peak, held.during))
        if next_us > span.end_us:
            yield Level(span.end_us, min(peak, held.after))
    end_us = computing[-1].end_us
    yield Level(end_us, min(peak, law.optimizer_step))


class _StageLaw:
    """Memory of a device with one stage, action by action."""

    def __init__(self, costs: ChainCosts, partition: Partition, stage: int, reserve: int) -> None:
        first, end = partition.intervals()[stage]
        count = len(partition.balance)
        self._most = SCHEDULES[partition.schedule].in_flight(stage, count, partition.micro_batches)
        self._last = partition.micro_batches - 1
        self._at: StageMoments = stage_moments(
            costs.of_replicas(partition.replicas),
            first,
            end,
            micro_batches=partition.micro_batches,
            in_flight=self._most,
            recompute=partition.recompute[stage],
            recomputed=partition.recomputed_in(stage),
        )
        self._reserve = reserve
        self._in_flight = 0
        self._gradients = 0
        self.idle = self._at.always + reserve
        self.optimizer_step = self._at.optimizer_step + reserve

    def hold(self, span: Span) -> _Held:
        """Bytes during and after `span`, the next one of the device."""
        if span.kind == "forward":
            self._in_flight += 1
            during = self._at.forward - (self._most - self._in_flight) * self._at.held
        else:
            later = self._in_flight <= self._at.left
            reference, count = (self._at.backward, self._at.left) if later else (self._at.first_backward, self._most)
            during = reference - (count - self._in_flight) * self._at.held
            if span.micro_batch == self._last:
                during = max(during, self._at.last_backward)
            self._in_flight -= 1
            self._gradients = self._at.gradients
        after = self._at.always + self._gradients + self._in_flight * self._at.held
        return _Held(during + self._reserve, min(during, after) + self._reserve)


class _ChunkLaw:
    """Memory of a device whose chunks take turns, action by action."""

    def __init__(self, costs: ChainCosts, partition: Partition, device: int, reserve: int) -> None:
        chunks = list(chunks_on(device, costs, partition).values())
        parts = np.stack([chunk.parts for chunk in chunks])
        self.idle = reserve + sum(chunk.always.total for chunk in chunks)
        counts = counts_of(partition.actions())[device]
        during, after = ((count * parts).sum(axis=(1, 2)) for count in counts)
        self._spans = zip(during.round().astype(int).tolist(), after.round().astype(int).tolist(), strict=True)
        steps = moments_of(partition.actions())[device][:, :, -1].any(axis=1)
        alive = (moments_of(partition.actions())[device][steps] * parts).sum(axis=(1, 2))
        self.optimizer_step = self.idle + round(float(alive.max()))

    def hold(self, _span: Span) -> _Held:
        """Bytes during and after the next span of the device."""
        during, after = next(self._spans)
        return _Held(self.idle + during, self.idle + min(during, after))
