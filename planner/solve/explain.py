"""Why nothing fits, and the nearest things that would: each computed, none guessed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.core.costs import ChainCosts, costs_at, covers
from planner.core.errors import InfeasibleError
from planner.core.plan import Inputs
from planner.core.profile import Profile
from planner.core.units import format_bytes
from planner.solve.intervals import IntervalMemories

__all__ = ["Question", "explain_infeasible", "least_excess_bytes", "smallest_cap_bytes"]

FloatArray = NDArray[np.float64]

_MOST_DEVICES = 1024
"""Beyond this, "more devices" is no advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked and cannot be had."""

    profile: Profile
    inputs: Inputs
    balance: tuple[int, ...] | None
    candidates: tuple[tuple[int, ChainCosts], ...]
    """The M that were tried, with their costs."""

    @property
    def equal_caps(self) -> bool:
        """Whether all devices have the same cap."""
        return len(set(self.inputs.memory_bytes)) == 1

    def needs(self, costs: ChainCosts, micro_batches: int, inputs: Inputs | None = None) -> FloatArray:
        """Least bytes of every stage i..j-1 at [i, j], the reserve included; infinite where the cuts are given."""
        policy = (inputs or self.inputs).recompute
        need = IntervalMemories.of(costs, micro_batches=micro_batches, policy=policy).smallest()
        if self.balance is not None:
            given = np.full_like(need, np.inf)
            for first, end in pairwise(np.cumsum([0, *self.balance])):
                given[first, end] = need[first, end]
            need = given
        return need + self.inputs.reserve_bytes


def explain_infeasible(question: Question) -> InfeasibleError:
    """The error that says what is in the way and what would fit."""
    inputs = question.inputs
    needs = {m: question.needs(costs, m) for m, costs in question.candidates}
    smallest = {m: smallest_cap_bytes(need, inputs.devices) for m, need in needs.items()}
    best_m = min(smallest, key=lambda m: (smallest[m], m))
    hints = [f"with {inputs.devices} devices the smallest `--mem` is {_as_option(smallest[best_m])} (M = {best_m})"]
    if question.equal_caps and question.balance is None:
        cap = inputs.memory_bytes[0]
        count = _smallest_count(needs, cap, len(question.profile.layers))
        if count is not None:
            hints.append(f"`--devices {count[0]}` fits in {format_bytes(cap)} (M = {count[1]})")
    more = _larger_count(question)
    if more is not None:
        hints.append(f"M = {more} fits: allow it with `--micro-batches`, or profile smaller micro-batches")
    if inputs.recompute != "auto" and _fits(question, replace(inputs, recompute="auto"), question.candidates):
        hints.append("`--recompute auto` fits")
    reason = _reason(question, needs[best_m], best_m)
    return InfeasibleError(f"no plan fits {_caps(inputs)}: {reason}", hint="; ".join(hints))


def smallest_cap_bytes(need: FloatArray, num_devices: int) -> int:
    """Smallest cap under which at most `num_devices` stages, each with `need` bytes at [i, j], cover the chain."""
    return int(least_excess_bytes(need, (0,) * num_devices))


def least_excess_bytes(need: FloatArray, caps: Sequence[int]) -> float:
    """Smallest possible largest excess of a stage over its device's cap; the chain fits if it is not above 0."""
    best = np.where(np.arange(need.shape[0]) == 0, -np.inf, np.inf)
    least = np.inf
    for cap in caps:
        best = np.min(np.maximum(best[:, None], need - cap), axis=0)
        least = min(least, float(best[-1]))
    return least


def _smallest_count(needs: dict[int, FloatArray], cap: int, num_layers: int) -> tuple[int, int] | None:
    """Fewest stages (and their M) that fit under `cap`."""
    counts = []
    for m, need in needs.items():
        # A stage may fit although a shorter one does not (recomputation), so every reachable cut counts.
        fits, reach, stages = need <= cap, {0}, 0
        while reach and num_layers not in reach and stages < min(_MOST_DEVICES, num_layers):
            reach = {int(j) for i in reach for j in np.flatnonzero(fits[i])}
            stages += 1
        if num_layers in reach:
            counts.append((stages, m))
    return min(counts, default=None)


def _larger_count(question: Question) -> int | None:
    """The smallest M not tried that would fit, where the profile covers its micro-batch size."""
    inputs, profile = question.inputs, question.profile
    tried = {m for m, _ in question.candidates}
    for m in range(1, inputs.batch + 1):
        size = inputs.batch // m
        if inputs.batch % m or m in tried or not covers(profile, size, extrapolate=inputs.extrapolate):
            continue
        if _fits(question, inputs, [(m, costs_at(profile, size, extrapolate=inputs.extrapolate))]):
            return m
    return None


def _fits(question: Question, inputs: Inputs, candidates: Sequence[tuple[int, ChainCosts]]) -> bool:
    needs = (question.needs(costs, m, inputs) for m, costs in candidates)
    return any(least_excess_bytes(need, inputs.memory_bytes) <= 0 for need in needs)


def _reason(question: Question, need: FloatArray, m: int) -> str:
    costs = dict(question.candidates)[m]
    caps = question.inputs.memory_bytes
    if question.balance is not None:
        cuts = pairwise(np.cumsum([0, *question.balance]))
        over = [float(need[first, end]) - cap for (first, end), cap in zip(cuts, caps, strict=False)]
        stage = int(np.argmax(over))
        total = format_bytes(over[stage] + caps[stage])
        return f"stage {stage} of the given cuts needs {total} with M = {m}, {format_bytes(over[stage])} over"
    alone = need[np.arange(costs.num_layers), np.arange(1, costs.num_layers + 1)]
    worst = int(alone.argmax())
    if alone[worst] > max(caps):
        over_bytes = format_bytes(alone[worst] - max(caps))
        return f'layer "{costs.names[worst]}" alone needs {format_bytes(alone[worst])} with M = {m}, {over_bytes} over'
    least = least_excess_bytes(need, caps)
    cannot = f"every layer fits alone, but {question.inputs.devices} stages do not hold them all"
    if question.equal_caps:
        return (
            f"{cannot}; the evenest cut needs {format_bytes(least + caps[0])} with M = {m}, {format_bytes(least)} over"
        )
    return f"{cannot}; in the best cut with M = {m} a stage is {format_bytes(least)} over its device's cap"


def _caps(inputs: Inputs) -> str:
    if len(set(inputs.memory_bytes)) == 1:
        each = format_bytes(inputs.memory_bytes[0])
        return f"{each} on each of {inputs.devices} device{'s' * (inputs.devices > 1)}"
    return f"the caps {', '.join(format_bytes(cap) for cap in inputs.memory_bytes)}"


def _as_option(size_bytes: int) -> str:
    """A cap rounded up to two decimals, as `--mem` takes it."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            whole, hundredths = divmod(-(-size_bytes * 100 // factor), 100)
            return f"{whole}{f'.{hundredths:02d}'.rstrip('0') if hundredths else ''}{unit}"
    return f"{size_bytes}B"
