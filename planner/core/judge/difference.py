"""Comparison of plans: the differences of two plans in memory and time, stage by stage, or a list of several plans."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Plan, Stage
from planner.core.values.units import format_bytes, format_us

_SAME_SHARE = 1e-4
"""Relative difference of samples per second up to which two steps count as equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """One stage in two plans; its values are None for a plan that lacks the stage."""

    index: int
    layers_before: int | None
    layers: int | None
    bytes_before: int | None
    bytes: int | None
    us_before: float | None
    """Forward plus backward time of one micro-batch, including recomputation, in microseconds."""
    us: float | None

    @property
    def more_bytes(self) -> int:
        """Growth of the stage's peak memory in bytes; 0 if only one plan has the stage."""
        return self.bytes - self.bytes_before if self.bytes is not None and self.bytes_before is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Values of a plan and of a reference plan; fields `…_before` have the values of the reference plan."""

    against: str
    """Reference plan: a file, or `git:REVISION`."""
    recomputed: bool
    """True if both plans were evaluated again from their profiles; else at least one plan has its stored values."""
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
    """Plan in a comparison, with its step time and memory."""

    path: str
    recomputed: bool
    """True if the plan was evaluated again from its profile; else its stored values are used."""
    fits: bool
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compared plans in the given order; the first one is the reference."""

    schema: Literal["gpipe-plan/compare/v1"] = "gpipe-plan/compare/v1"
    plans: tuple[ComparedPlan, ...]
    difference: Difference | None = None
    """Difference from the first to the second plan, stage by stage; only for two plans."""


def difference_of(before: Plan, now: Plan, *, name_before: str, both_evaluated_again: bool) -> Difference:
    """Return the differences between the plan `now` and the reference plan `before`.

    Args:
        before: Reference plan.
        now: Plan that is compared with the reference plan.
        name_before: Name of the reference plan.
        both_evaluated_again: True if both plans were evaluated again from their profiles.
    """
    return Difference(
        against=name_before,
        recomputed=both_evaluated_again,
        step_us_before=before.predicted.step_us,
        step_us=now.predicted.step_us,
        samples_per_s_before=before.predicted.samples_per_s,
        samples_per_s=now.predicted.samples_per_s,
        peak_bytes_before=max(before.peak_bytes_by_device()),
        peak_bytes=max(now.peak_bytes_by_device()),
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


def growth_findings(difference: Difference) -> Iterator[Finding]:
    """Yield findings for the stage whose memory grew most, and for a slower step."""
    against = difference.against
    grown = [(s.more_bytes, s) for s in difference.stages if s.more_bytes > 0]
    if grown:
        most, stage = max(grown, key=lambda pair: (pair[0], -pair[1].index))
        message = f"stage {stage.index} needs {format_bytes(most)} more than in {against}"
        more = len(grown) - 1
        hint = f"{more} other stage{'s' * (more > 1)} grew by at most as much" if more else ""
        yield finding("GP401", message, hint=hint, stage=stage.index)
    before, now = difference.samples_per_s_before, difference.samples_per_s
    if now < before * (1 - _SAME_SHARE):
        message = (
            f"{now:,.1f} samples/s, {1 - now / before:.1%} fewer than {before:,.1f} in {against}: a step takes "
            f"{format_us(difference.step_us)} instead of {format_us(difference.step_us_before)}"
        )
        yield finding("GP402", message)
