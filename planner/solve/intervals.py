"""Every possible stage at once: times and memory of all intervals [i, j) of the chain, as (L+1, L+1) arrays.

In GPipe a stage's memory does not depend on where the other cuts are, so a memory cap only says which intervals are
allowed, and with which recomputation. The cheapest recomputation that fits is always the right one: it costs the least
time, and nothing else in the plan depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.core.cluster import Cluster
from planner.core.costs import ChainCosts
from planner.core.memory import interval_memory
from planner.core.plan import Recompute, RecomputePolicy

__all__ = ["CHOICES", "IntervalMemories", "Intervals", "intervals_for", "link_us", "receive_us"]

FloatArray = NDArray[np.float64]

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")
"""From the cheapest in time to the cheapest in memory."""

_ROWS = 64  # intervals are worked out in blocks of rows, to bound the transient memory at large L


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Times of one stage of layers i..j-1 at [i, j], in microseconds; infinite where it fits no device it may use.

    `forward`, `backward`, `last_backward` are what the stage is busy for a micro-batch: the executor's overhead and
    receiving over blocking links included.
    """

    forward: FloatArray
    backward: FloatArray
    """Of micro-batches 0..M-2, recomputation included."""
    last_backward: FloatArray
    """Of micro-batch M-1."""
    choice: NDArray[np.int8]
    """Index into `CHOICES`; -1 where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalMemories:
    """Peak bytes of every interval for each allowed recompute choice; the reserve not included."""

    totals: dict[int, FloatArray]
    """By index into `CHOICES`."""

    @classmethod
    def of(cls, costs: ChainCosts, *, micro_batches: int, policy: RecomputePolicy) -> "IntervalMemories":
        """All intervals of the chain under GPipe with M micro-batches."""
        allowed = [n for n, choice in enumerate(CHOICES) if policy in ("auto", choice)]
        if micro_batches == 1 and policy in ("auto", "except-last"):
            allowed = [n for n in (0, *allowed) if CHOICES[n] != "except-last"]  # the only micro-batch is the last
        num = costs.num_layers
        totals = {n: np.full((num + 1, num + 1), np.inf) for n in allowed}
        for start in range(0, num, _ROWS):
            firsts = np.arange(start, min(start + _ROWS, num))
            for n in allowed:
                rows = interval_memory(
                    costs, firsts, micro_batches=micro_batches, in_flight=micro_batches, recompute=CHOICES[n]
                )
                totals[n][firsts, 1:] = rows.total()
        backwards = np.tri(num + 1, dtype=bool)  # [i, j] with j <= i is no interval
        for total in totals.values():
            total[backwards] = np.inf
        return cls(totals=totals)

    def smallest(self) -> FloatArray:
        """Least bytes each interval can do with."""
        smallest: FloatArray = np.minimum.reduce(list(self.totals.values()))
        return smallest


def intervals_for(costs: ChainCosts, memories: IntervalMemories, cluster: Cluster, cap_bytes: float) -> Intervals:
    """The times of every interval on a device with `cap_bytes`, with the cheapest recomputation that fits."""
    num = costs.num_layers
    forward = _sums(costs.forward_us)
    backward = _sums(costs.backward_us)
    choice = np.full((num + 1, num + 1), -1, dtype=np.int8)
    for n in sorted(memories.totals, reverse=True):
        choice[memories.totals[n] + cluster.reserve_bytes <= cap_bytes] = n
    again = np.where(choice > 0, forward, 0.0)
    last_again = np.where(choice == CHOICES.index("always"), forward, 0.0)
    nowhere = np.where(choice < 0, np.inf, cluster.overhead_us)
    receive = receive_us(costs, cluster)
    return Intervals(
        forward=forward + nowhere + receive[:, None],
        backward=backward + again + nowhere + receive[None, :],
        last_backward=backward + last_again + nowhere + receive[None, :],
        choice=choice,
    )


def link_us(costs: ChainCosts, cluster: Cluster) -> FloatArray:
    """Time on the link itself for a cut in front of layer i, i = 0..L; 0 at the ends and where links are blocking."""
    return np.zeros(costs.num_layers + 1) if cluster.link.blocking else _boundary_us(costs, cluster)


def receive_us(costs: ChainCosts, cluster: Cluster) -> FloatArray:
    """Time that the receiving stage is kept busy, likewise; 0 where links overlap with compute."""
    return _boundary_us(costs, cluster) if cluster.link.blocking else np.zeros(costs.num_layers + 1)


def _boundary_us(costs: ChainCosts, cluster: Cluster) -> FloatArray:
    crossing = [cluster.link.transfer_us(float(size)) for size in costs.output[:-1]]
    return np.array([0.0, *crossing, 0.0])


def _sums(per_layer: Sequence[float] | FloatArray) -> FloatArray:
    before: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
    between: FloatArray = before[None, :] - before[:, None]
    return between
