"""Why nothing fits, and the nearest things that would: each computed, none guessed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.core.costs import ChainCosts, costs_at, covers
from planner.core.errors import InfeasibleError
from planner.core.plan import Inputs
from planner.core.profile import Profile
from planner.core.units import format_bytes
from planner.solve.intervals import IntervalMemories

__all__ = ["explain_infeasible", "smallest_cap_bytes"]

FloatArray = NDArray[np.float64]

_MOST_DEVICES = 1024
"""Beyond this, "more devices" is no advice."""


def explain_infeasible(
    profile: Profile, inputs: Inputs, candidates: Sequence[tuple[int, ChainCosts]]
) -> InfeasibleError:
    """The error that says what is in the way and what would fit.

    Args:
        profile: The profile.
        inputs: What was asked.
        candidates: The M that were tried, with their costs.
    """
    needs = {m: _memories(costs, m, inputs) for m, costs in candidates}
    caps = {m: smallest_cap_bytes(need, inputs.devices) + inputs.reserve_bytes for m, need in needs.items()}
    best_m = min(caps, key=lambda m: (caps[m], m))
    cap = max(inputs.memory_bytes)
    hints = [f"with {inputs.devices} devices the smallest `--mem` is {_as_option(caps[best_m])} (M = {best_m})"]
    count = _smallest_count(needs, cap - inputs.reserve_bytes, len(profile.layers))
    if count is not None and len(set(inputs.memory_bytes)) == 1:
        hints.append(f"`--devices {count[0]}` fits in {format_bytes(cap)} (M = {count[1]})")
    more = _larger_count(profile, inputs, [m for m, _ in candidates])
    if more is not None:
        hints.append(f"M = {more} fits: allow it with `--micro-batches`, or profile smaller micro-batches")
    if inputs.recompute in ("never", "except-last") and _fits(replace(inputs, recompute="auto"), candidates):
        hints.append("`--recompute auto` fits")
    return InfeasibleError(
        f"no plan fits {_caps(inputs)}: {_worst_layer(needs[best_m], candidates, best_m, inputs, caps[best_m])}",
        hint="; ".join(hints),
    )


def smallest_cap_bytes(need: FloatArray, num_devices: int) -> int:
    """Smallest cap under which at most `num_devices` stages, each with `need` bytes at [i, j], cover the chain."""
    best = np.where(np.arange(need.shape[0]) == 0, 0.0, np.inf)
    for _ in range(num_devices):
        best = np.minimum(best, np.min(np.maximum(best[:, None], need), axis=0))
    return int(best[-1])


def _memories(costs: ChainCosts, micro_batches: int, inputs: Inputs) -> FloatArray:
    return IntervalMemories.of(costs, micro_batches=micro_batches, policy=inputs.recompute).smallest()


def _smallest_count(needs: dict[int, FloatArray], cap: float, num_layers: int) -> tuple[int, int] | None:
    """Fewest stages (and their M) that fit under `cap`, each stage as long as it can be."""
    counts = []
    for m, need in needs.items():
        reached, stages = 0, 0
        # A stage may fit although a shorter one does not (recomputation), so every reachable cut counts.
        fits = need <= cap
        reach = {0}
        while reach and reached < num_layers and stages < min(_MOST_DEVICES, num_layers):
            reach = {int(j) for i in reach for j in np.flatnonzero(fits[i])}
            reached, stages = max(reach, default=0), stages + 1
        if num_layers in reach:
            counts.append((stages, m))
    return min(counts, default=None)


def _larger_count(profile: Profile, inputs: Inputs, tried: Sequence[int]) -> int | None:
    """The smallest M not tried that would fit, where the profile covers its micro-batch size."""
    for m in range(1, inputs.batch + 1):
        size = inputs.batch // m
        if inputs.batch % m or m in tried or not covers(profile, size, extrapolate=inputs.extrapolate):
            continue
        if _fits(inputs, [(m, costs_at(profile, size, extrapolate=inputs.extrapolate))]):
            return m
    return None


def _fits(inputs: Inputs, candidates: Sequence[tuple[int, ChainCosts]]) -> bool:
    cap = max(inputs.memory_bytes) - inputs.reserve_bytes
    return any(smallest_cap_bytes(_memories(costs, m, inputs), inputs.devices) <= cap for m, costs in candidates)


def _worst_layer(
    need: FloatArray, candidates: Sequence[tuple[int, ChainCosts]], m: int, inputs: Inputs, smallest_cap: int
) -> str:
    costs = dict(candidates)[m]
    cap = max(inputs.memory_bytes)
    alone = np.array([need[i, i + 1] for i in range(costs.num_layers)]) + inputs.reserve_bytes
    worst = int(alone.argmax())
    if alone[worst] > cap:
        over = format_bytes(alone[worst] - cap)
        return f'layer "{costs.names[worst]}" alone needs {format_bytes(alone[worst])} with M = {m}, {over} over'
    return (
        f"every layer fits alone, but {inputs.devices} stages do not hold them all; "
        f"the evenest cut needs {format_bytes(smallest_cap)} with M = {m}, {format_bytes(smallest_cap - cap)} over"
    )


def _caps(inputs: Inputs) -> str:
    caps = sorted(set(inputs.memory_bytes))
    if len(caps) == 1:
        return f"{format_bytes(caps[0])} on each of {inputs.devices} device{'s' * (inputs.devices > 1)}"
    return f"the caps {', '.join(format_bytes(cap) for cap in inputs.memory_bytes)}"


def _as_option(size_bytes: int) -> str:
    """A cap rounded up to two decimals, as `--mem` takes it."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            hundredths = -(-size_bytes * 100 // factor)
            return f"{hundredths / 100:g}{unit}"
    return f"{size_bytes}B"
