"""Plans side by side: by how many bytes and how much time the stages of two differ, and several in a row."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Plan, Stage
from planner.core.values.units import format_bytes, format_us

_SAME_SHARE = 1e-4
"""Rates that differ by a smaller share are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """One stage before and now; None where only one of the plans has it."""

    index: int
    layers_before: int | None
    layers: int | None
    bytes_before: int | None
    bytes: int | None
    us_before: float | None
    """Forward and backward of one micro-batch, with any recomputation."""
    us: float | None

    @property
    def more_bytes(self) -> int:
        """The growth in bytes; 0 where there is nothing to compare."""
        return self.bytes - self.bytes_before if self.bytes is not None and self.bytes_before is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What became of another plan."""

    against: str
    """Which: a file, or `git:REVISION`."""
    recomputed: bool
    """Whether that plan was recomputed from its profile; else its own numbers were taken."""
    step_us_before: float
    step_us: float
    samples_per_s_before: float
    samples_per_s: float
    peak_bytes_before: int
    peak_bytes: int
    micro_batch_size_before: int
    micro_batch_size: int
    stages: tuple[StageDifference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One of the plans."""

    path: str
    recomputed: bool
    """Whether its numbers were recomputed from its profile; else they are those it was written with."""
    fits: bool
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The plans in the order given; the first is what the others are compared with."""

    schema: Literal["gpipe-plan/compare/v1"] = "gpipe-plan/compare/v1"
    plans: tuple[ComparedPlan, ...]
    difference: Difference | None = None
    """Stage by stage, of two plans: from the first to the second."""


def difference_of(before: Plan, now: Plan, *, against: str, recomputed: bool) -> Difference:
    """How `now` differs from `before`."""
    return Difference(
        against=against,
        recomputed=recomputed,
        step_us_before=before.predicted.step_us,
        step_us=now.predicted.step_us,
        samples_per_s_before=before.predicted.samples_per_s,
        samples_per_s=now.predicted.samples_per_s,
        peak_bytes_before=max(before.device_bytes()),
        peak_bytes=max(now.device_bytes()),
        micro_batch_size_before=before.micro_batch_size,
        micro_batch_size=now.micro_batch_size,
        stages=tuple(_stage(k, a, b) for k, (a, b) in enumerate(zip_longest(before.stages, now.stages))),
    )


def _stage(index: int, before: Stage | None, now: Stage | None) -> StageDifference:
    return StageDifference(
        index=index,
        layers_before=before.layers if before else None,
        layers=now.layers if now else None,
        bytes_before=before.memory.total if before else None,
        bytes=now.memory.total if now else None,
        us_before=before.forward_us + before.backward_us if before else None,
        us=now.forward_us + now.backward_us if now else None,
    )


def growth(difference: Difference) -> Iterator[Finding]:
    """Notes on what has become larger or slower: the stage that grew most, and the step."""
    against = difference.against
    grown = [(s.more_bytes, s) for s in difference.stages if s.more_bytes > 0]
    if grown:
        most, stage = max(grown, key=lambda pair: (pair[0], -pair[1].index))
        message = f"stage {stage.index} needs {format_bytes(most)} more than in {against}"
        more = len(grown) - 1
        hint = f"{more} other stage{'s' * (more > 1)} grew by no more" if more else ""
        yield finding("GP401", message, hint=hint, stage=stage.index)
    before, now = difference.samples_per_s_before, difference.samples_per_s
    if now < before * (1 - _SAME_SHARE):
        message = (
            f"{now:,.1f} samples/s, {1 - now / before:.1%} fewer than {before:,.1f} in {against}: a step takes "
            f"{format_us(difference.step_us)} instead of {format_us(difference.step_us_before)}"
        )
        yield finding("GP402", message)
