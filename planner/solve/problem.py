"""One question for the label programme: where to cut a chain for M micro-batches, with everything as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.values.cluster import Link
from planner.solve.arrays import BoolArray, ChoiceArray, FloatArray, IndexArray, IntArray
from planner.solve.tables import CHOICES, LAYERS, NOWHERE

__all__ = ["Afterwards", "ChainProblem", "DeviceTable", "LinkTimes", "Stages", "prefix"]


_AGAIN, _LAST_AGAIN = CHOICES.index("except-last"), CHOICES.index("always")


class Stages(NamedTuple):
    """Stages that end at each of n cuts: one row per cut, one column per first layer, times in microseconds.

    Times are what the stage is busy for a micro-batch: the executor's overhead and receiving over blocking links
    included. Infinite where there is no such stage.
    """

    first: IntArray
    end: IntArray
    """Shape (n, 1), like everything that depends on the end alone."""
    choice: ChoiceArray
    forward: FloatArray
    backward: FloatArray
    """Micro-batches 0..M-2 take so long, recomputation included."""
    last_backward: FloatArray
    """Micro-batch M-1 takes so long."""
    backward_alone: FloatArray
    """Without any recomputation."""
    link: FloatArray
    """Shape (n, 1): time on the link behind the stage."""
    received: FloatArray
    """What of `backward` is receiving gradients, less what of `forward` is receiving activations."""
    own_us: FloatArray
    """U, all-reduce and optimizer's step of the stage."""
    sent_bytes: FloatArray
    """Shape (n, 1): what crosses the boundary behind the stage."""
    peak_bytes: FloatArray
    """Peak memory; of shape (n, 1) and 0 where the tables do not hold it."""

    @property
    def hidden(self) -> FloatArray:
        """What the stage hides of the optimizers' steps behind it: F + W + 2 C."""
        return self.forward + self.backward_alone + 2 * self.link + self.received

    def at(self, row: IndexArray, column: IndexArray) -> "Stages":
        """Single stages, in arrays of shape (m,)."""
        width = self.first.shape[1]
        return Stages(*(field[row, column if field.shape[1] == width else 0] for field in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One link of the pipeline, for every cut that may lie on it; arrays of shape (L+1,), 0 at both ends."""

    on_link_us: FloatArray
    """Where transfers overlap with compute."""
    receive_us: FloatArray
    """Where they keep the receiving stage busy."""

    @classmethod
    def of(cls, link: Link | None, costs: ChainCosts) -> "LinkTimes":
        """The times to move the boundary in front of each layer once; None where there is nothing to cross."""
        nothing = np.zeros(costs.num_layers + 1)
        if link is None:
            return cls(on_link_us=nothing, receive_us=nothing)
        crossing = link.latency_us + (
            costs.boundaries.output[:-1] / link.bytes_per_s * 1e6 if link.bytes_per_s else 0.0
        )
        times = nothing.copy()
        times[1:-1] = crossing
        return cls(on_link_us=nothing, receive_us=times) if link.blocking else cls(on_link_us=times, receive_us=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """What one device can run, in windows as in `planner.solve.tables`."""

    speed: float
    choice: ChoiceArray
    """Index into `CHOICES`, or `LAYERS`, or `NOWHERE`; shape (L+1, width)."""
    again_us: FloatArray | None = None
    """Recomputation of single layers on the profiled device, where that is the choice."""
    bytes: FloatArray | None = None
    """Peak memory with that choice, where it is asked for."""

    @property
    def width(self) -> int:
        """Layers of the longest stage."""
        return int(self.choice.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Afterwards:
    """What follows a stage's last backward: its gradients summed over replicas, then its optimizer's step."""

    optimizer_us: FloatArray
    """Shape (L+1,): sums over layers 0..i-1, like `gradient_bytes`."""
    gradient_bytes: FloatArray
    ties: tuple[tuple[int, int, float], ...]
    """First and last layer and gradient bytes that a stage with both holds once."""
    latency_us: float
    us_per_byte: float
    """What the all-reduce takes, with `latency_us`; both 0 where there is a single replica."""

    def own_us(self, first: IntArray, end: IntArray, speed: float) -> FloatArray:
        """For the stages of layers first..end-1."""
        step_us: FloatArray = (self.optimizer_us[end] - self.optimizer_us[first]) / speed
        if not self.latency_us and not self.us_per_byte:
            return step_us
        gradients = self.gradient_bytes[end] - self.gradient_bytes[first]
        for low, high, shared in self.ties:
            gradients = gradients - np.where((first <= low) & (high < end), shared, 0.0)
        return step_us + np.where(gradients > 0, self.latency_us + gradients * self.us_per_byte, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """Where to cut a chain of L layers into at most (or exactly) `num_stages` stages.

    Stages are counted from the last one: level 0 holds layer L-1.
    """

    num_stages: int
    exact: bool
    """Whether exactly `num_stages` stages are wanted, because devices or links differ from level to level."""
    micro_batches: int
    forward_us: FloatArray
    """Shape (L+1,): of layers 0..i-1 on the profiled device, like `backward_us`."""
    backward_us: FloatArray
    has_backward: BoolArray
    """Shape (L+1,): whether a stage that ends in front of layer i has one, and so can be recomputed."""
    overhead_us: float
    tables: tuple[tuple[DeviceTable, ...], ...]
    """Per level, the ways to run its stage."""
    links: tuple[LinkTimes, ...]
    """Behind the stage of each level, and in front of the last."""
    afterwards: Afterwards
    output_bytes: FloatArray
    """Shape (L+1,): what crosses a cut in front of layer i, 0 at both ends."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward_us) - 1

    @property
    def alike(self) -> bool:
        """Whether every level can run the same stages."""
        return all(ways is self.tables[0] for ways in self.tables)

    @property
    def width(self) -> int:
        """Layers of the longest stage."""
        return self.tables[0][0].width

    @property
    def fastest(self) -> float:
        """Highest speed of a device."""
        return max(table.speed for ways in self.tables for table in ways)

    def stages(self, level: int, way: int, ends: IntArray) -> Stages:
        """The stages of a level that end at each of `ends`, run in one of the ways of that level."""
        table, behind, before = self.tables[level][way], self.links[level], self.links[level + 1]
        end = ends[:, None]
        first = end + np.arange(-table.width, 0)
        choice = table.choice[ends]
        fits = choice != NOWHERE
        first = np.where(fits, first, 0)
        forward = (self.forward_us[end] - self.forward_us[first]) / table.speed
        backward = (self.backward_us[end] - self.backward_us[first]) / table.speed
        whole = np.where(self.has_backward[end], forward, 0.0)
        again = np.where((choice == _AGAIN) | (choice == _LAST_AGAIN), whole, 0.0)
        last_again = np.where(choice == _LAST_AGAIN, whole, 0.0)
        if table.again_us is not None:
            layers = table.again_us[ends] / table.speed
            again = np.where(choice == LAYERS, layers, again)
            last_again = np.where(choice == LAYERS, layers, last_again)
        overhead = np.where(fits, self.overhead_us, np.inf)
        from_before, from_behind = before.receive_us[first], behind.receive_us[end]
        return Stages(
            first=first,
            end=end,
            choice=choice,
            forward=forward + overhead + from_before,
            backward=backward + again + overhead + from_behind,
            last_backward=backward + last_again + overhead + from_behind,
            backward_alone=backward + overhead + from_behind,
            link=behind.on_link_us[end],
            received=from_behind - from_before,
            own_us=self.afterwards.own_us(first, end, table.speed),
            sent_bytes=self.output_bytes[end],
            peak_bytes=np.zeros(end.shape) if table.bytes is None else table.bytes[ends],
        )


def prefix(per_layer: Sequence[float] | FloatArray) -> FloatArray:
    """Sums over layers 0..i-1, shape (L+1,)."""
    before: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
    return before
