"""How long a stage is busy, and what follows its last backward: each law once, for one stage as for tables of stages.

    F    forward of a micro-batch
    B    its backward with recomputation; of the last micro-batch, too
    W    its backward without
    C    crossing the boundary behind the stage
    U    what follows the last backward: gradients summed over the replicas, then the optimizer's step

Arguments are numbers or arrays, which broadcast. Sums over the layers of stages come in, as measured on the profiled
device: `planner.core.cost.evaluate` adds up those of one partition, searches take differences of `ChainSums`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.core.cost.chain_costs import ChainCosts, Tie, sums_before
from planner.core.cost.simulate import StageTimes
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Numbers = FloatArray | float

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")
"""From the cheapest in time to the cheapest in memory; tables of stages hold places in it."""

LAYERS = len(CHOICES)
"""In place of an index into `CHOICES`: single layers are recomputed."""

_EXCEPT_LAST = CHOICES.index("except-last")


class BusyTimes(NamedTuple):
    """What stages are busy for a micro-batch, in microseconds; the fields are those of `StageTimes`."""

    forward_us: FloatArray
    backward_us: FloatArray
    last_backward_us: FloatArray
    recompute_us: FloatArray
    last_recompute_us: FloatArray


def busy_times(
    forward_us: FloatArray,
    backward_us: FloatArray,
    recompute: ArrayLike,
    *,
    has_backward: ArrayLike,
    layers_us: Numbers = 0.0,
    speed: Numbers = 1.0,
    overhead_us: Numbers = 0.0,
) -> BusyTimes:
    """What stages are busy for a micro-batch.

    Args:
        forward_us: Of all layers of the stage.
        backward_us: The same, without recomputation.
        recompute: Index into `CHOICES`, or `LAYERS`; below 0 as 0.
        has_backward: Whether the stage has one: else nothing is computed again.
        layers_us: Forward of the layers that are recomputed where the choice is `LAYERS`.
        speed: How many times faster than the profiled device the stage's device is.
        overhead_us: The executor's own time for each direction.
    """
    forward, backward, choice = forward_us / speed, backward_us / speed, np.asarray(recompute)
    whole = np.where(has_backward, forward, 0.0)
    again = np.where(choice == LAYERS, layers_us / speed, np.where(choice > 0, whole, 0.0))
    last_again = np.where(choice == _EXCEPT_LAST, 0.0, again)
    return BusyTimes(
        forward + overhead_us, backward + again + overhead_us, backward + last_again + overhead_us, again, last_again
    )


class HalfTimes(NamedTuple):
    """What stages are busy for the halves of a backward, in microseconds; the fields are those of `StageTimes`."""

    input_backward_us: FloatArray
    last_input_backward_us: FloatArray
    weight_backward_us: FloatArray


def half_times(
    busy: BusyTimes,
    input_us: FloatArray,
    weight_us: FloatArray,
    *,
    speed: Numbers = 1.0,
    overhead_us: Numbers = 0.0,
) -> HalfTimes:
    """What stages are busy for the halves of a backward; activations are computed again in the first one.

    Args:
        busy: The stages otherwise.
        input_us: I of all layers of the stage.
        weight_us: W of all layers of the stage.
        speed: How many times faster than the profiled device the stage's device is.
        overhead_us: The executor's own time for each of them.
    """
    input_backward = input_us / speed + overhead_us
    return HalfTimes(
        input_backward + busy.recompute_us,
        input_backward + busy.last_recompute_us,
        weight_us / speed + overhead_us,
    )


def hidden_us(stage: BusyTimes | StageTimes, crossing_us: Numbers) -> FloatArray:
    """What a stage hides of the optimizers' steps behind it, F + W + 2 C: its part of the drain and of the next fill.

    Recomputation does not count: it may not make the drain any longer, where a slower stage is behind it.
    """
    alone_us = stage.last_backward_us - stage.last_recompute_us
    return np.asarray(stage.forward_us + alone_us + 2 * crossing_us)


def tail_in_front_us(tail_us: Numbers, own_us: Numbers, hidden_us: Numbers) -> FloatArray:
    """By how much optimizers delay the next step with a stage in front of those that come to `tail_us`."""
    tail: FloatArray = np.maximum(own_us, np.subtract(tail_us, hidden_us))
    return tail


def optimizer_tail_us(own_us: FloatArray, hidden_us: FloatArray) -> FloatArray:
    """How long after the last backward the next step can begin, if steps follow each other without a break.

    Args:
        own_us: U of each device; shape (..., K).
        hidden_us: What each device's first stage hides; shape (..., K).

    Returns:
        max over k of U_k - sum_{j<k} hidden_j, shape (...): stage k ends its last backward before stage 0 does, and
        begins the next step later. Never less than U_0.
    """
    tail: FloatArray = np.zeros(own_us.shape[:-1])
    for k in reversed(range(own_us.shape[-1])):
        tail = tail_in_front_us(tail, own_us[..., k], hidden_us[..., k])
    return tail


def shared_gradient_bytes(ties: Sequence[Tie], first: IntArray | int, end: IntArray | int) -> FloatArray:
    """What the gradients of layers first..end-1 add up to beyond what a stage of them holds."""
    shared = np.zeros(np.broadcast_shapes(np.shape(first), np.shape(end)))
    for tie in ties:
        shared += np.where((first <= tie.first) & (tie.second < end), tie.gradient_bytes, 0.0)
    return shared


@dataclass(frozen=True, kw_only=True)
class ChainSums:
    """Sums over the layers in front of each cut, of shape (L+1,): those of a stage are the differences of two."""

    costs: ChainCosts
    forward_us: FloatArray
    backward_us: FloatArray
    optimizer_us: FloatArray
    gradient_bytes: FloatArray
    has_backward: NDArray[np.bool_]
    """Whether a stage that ends at the cut has one."""
    crossing_bytes: FloatArray
    """What crosses the cut, 0 at both ends of the chain."""
    cluster: Cluster
    replicas: int

    @classmethod
    def of(cls, costs: ChainCosts, cluster: Cluster, replicas: int) -> "ChainSums":
        """The sums of a chain, for pipelines of that cluster."""
        return cls(
            costs=costs,
            forward_us=sums_before(costs.forward_us),
            backward_us=sums_before(costs.backward_us),
            optimizer_us=sums_before(costs.optimizer_us),
            gradient_bytes=sums_before(costs.gradients),
            has_backward=np.append(False, costs.has_backward),
            crossing_bytes=np.array([0.0, *costs.boundaries.output[:-1], 0.0]),
            cluster=cluster,
            replicas=replicas,
        )

    def busy_times(
        self, first: IntArray, end: IntArray, recompute: ArrayLike, *, speed: Numbers, layers_us: Numbers = 0.0
    ) -> BusyTimes:
        """What stages of layers first..end-1 are busy for a micro-batch, see `busy_times`."""
        return busy_times(
            self.forward_us[end] - self.forward_us[first],
            self.backward_us[end] - self.backward_us[first],
            recompute,
            has_backward=self.has_backward[end],
            layers_us=layers_us,
            speed=speed,
            overhead_us=self.cluster.overhead_us,
        )

    def half_times(self, busy: BusyTimes, first: IntArray, end: IntArray, *, speed: Numbers) -> HalfTimes:
        """What stages of layers first..end-1 are busy for the halves of a backward, see `half_times`."""
        input_us, weight_us = self._halves_us
        return half_times(
            busy,
            input_us[end] - input_us[first],
            weight_us[end] - weight_us[first],
            speed=speed,
            overhead_us=self.cluster.overhead_us,
        )

    @cached_property
    def _halves_us(self) -> tuple[FloatArray, FloatArray]:
        """I and W; composed when they are asked for, since few schedules have halves."""
        return sums_before(self.costs.halves.input_us), sums_before(self.costs.halves.weight_us)

    def own_us(self, first: IntArray, end: IntArray, speed: Numbers) -> FloatArray:
        """U of the stages of layers first..end-1."""
        optimizer_us = (self.optimizer_us[end] - self.optimizer_us[first]) / speed
        return optimizer_us if self.replicas == 1 else optimizer_us + self.replica_sums_us(first, end)

    def replica_sums_us(self, first: IntArray, end: IntArray) -> FloatArray:
        """The part of U that sums the gradients of layers first..end-1 over the replicas."""
        gradient_bytes = self.gradient_bytes[end] - self.gradient_bytes[first]
        unshared_bytes = gradient_bytes - shared_gradient_bytes(self.costs.ties, first, end)
        return self.cluster.allreduce_us(unshared_bytes, self.replicas)
