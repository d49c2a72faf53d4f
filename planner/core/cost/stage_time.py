"""Compute how long a stage is busy, and by how much all-reduces and optimizer delay the next step.

    F    forward of a micro-batch
    B    backward with recomputation; a separate value for the last micro-batch
    R    recomputation, so B - R is the backward without it
    C    one transfer over the boundary to the next stage
    U    time after the last backward: all-reduce of gradients over the replicas, then the optimizer's step

Functions take numbers or arrays, so that all callers use the same formulas. Inputs are sums over a stage's layers on
the profiled device. `planner.core.cost.evaluate` sums the layers of one partition. Searches subtract entries of
`ChainSums`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from planner.core.cost.arrays import BoolArray, FloatArray, IntArray
from planner.core.cost.chain_costs import ChainCosts, TiedParameters, prefix_sums
from planner.core.cost.simulate import StageTimes
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute

Numbers = FloatArray | float

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")
"""Recompute choices, from the fastest to the one that uses least memory. Tables of stages store their indices."""

LAYERS = len(CHOICES)
"""Recompute choice of a stage that recomputes single layers, in place of an index into `CHOICES`."""

_EXCEPT_LAST = CHOICES.index("except-last")


class StageBusyTimes(NamedTuple):
    """Times of stages for one micro-batch, in microseconds."""

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
    recomputed_layers_us: Numbers = 0.0,
    speed: Numbers = 1.0,
    overhead_us: Numbers = 0.0,
) -> StageBusyTimes:
    """Return the forward, backward and recomputation times of stages for one micro-batch.

    Args:
        forward_us: Sum of the forward times of the stage's layers, plus the entry time of the first layer. The entry
            time is the time from the start of the stage's forward to the start of this layer.
        backward_us: Sum of the backward times of the stage's layers, without recomputation.
        recompute: Recompute choice of each stage: an index into `CHOICES` (negative: `never`), or `LAYERS`.
        has_backward: False for stages without a backward, which recompute nothing.
        recomputed_layers_us: Sum of the forward times of the recomputed layers, if the choice is `LAYERS`.
        speed: Speed of the stage's device, relative to the profiled device.
        overhead_us: The executor's own time per action.
    """
    forward, backward, choice = forward_us / speed, backward_us / speed, np.asarray(recompute)
    whole = np.where(has_backward, forward, 0.0)
    each = np.where(choice == LAYERS, recomputed_layers_us / speed, np.where(choice > 0, whole, 0.0))
    last = np.where(choice == _EXCEPT_LAST, 0.0, each)
    return StageBusyTimes(
        forward + overhead_us, backward + each + overhead_us, backward + last + overhead_us, each, last
    )


class SplitBackwardTimes(NamedTuple):
    """Times of both passes of a split backward for one micro-batch, in microseconds."""

    input_backward_us: FloatArray
    last_input_backward_us: FloatArray
    weight_backward_us: FloatArray


def split_backward_times(
    busy: StageBusyTimes,
    input_us: FloatArray,
    weight_us: FloatArray,
    *,
    speed: Numbers = 1.0,
    overhead_us: Numbers = 0.0,
) -> SplitBackwardTimes:
    """Return the times of both passes of a split backward. Recomputation is part of the input-gradient pass.

    Args:
        busy: Times of the same stages with whole backwards.
        input_us: Sum of the input-gradient times (I) of the stage's layers.
        weight_us: Sum of the weight-gradient times (W) of the stage's layers.
        speed: Speed of the stage's device, relative to the profiled device.
        overhead_us: The executor's own time per action.
    """
    input_backward = input_us / speed + overhead_us
    return SplitBackwardTimes(
        input_backward + busy.recompute_us,
        input_backward + busy.last_recompute_us,
        weight_us / speed + overhead_us,
    )


def optimizer_slack_us(stage: StageBusyTimes | StageTimes, transfer_us: Numbers) -> FloatArray:
    """Return how much longer the optimizer step may take on stage i + 1 than on stage i, in microseconds.

    If the difference is at most this slack, stage i + 1 delays the next training step no more than stage i does.
    `stage` has the times of stage i. The result is (C + B - R) + (F + C):

    - Stage i + 1 ends its last backward earlier than stage i, by one transfer C (`transfer_us`) and the last backward B
      of stage i. The recomputation R in B does not count, because it runs before the gradient arrives.
    - Stage i + 1 begins the next training step later than stage i, by the forward F of stage i and one transfer C.
    """
    alone_us = stage.last_backward_us - stage.last_recompute_us
    return np.asarray(stage.forward_us + alone_us + 2 * transfer_us)


def delay_with_added_stage_us(delay_us: Numbers, between_steps_us: Numbers, slack_us: Numbers) -> FloatArray:
    """Return the delay of the next training step after a stage is added before all other stages of the pipeline.

    All-reduces and optimizer steps cause the delay. All times are in microseconds.

    Args:
        delay_us: Delay without the added stage.
        between_steps_us: Time of the added stage's all-reduce and optimizer step.
        slack_us: `optimizer_slack_us` of the added stage.
    """
    tail: FloatArray = np.maximum(between_steps_us, np.subtract(delay_us, slack_us))
    return tail


def optimizer_delay_us(between_steps_us: FloatArray, slack_us: FloatArray) -> FloatArray:
    """Return the time by which all-reduces and optimizer steps delay the start of the next training step.

    A later device ends its last backward earlier and begins the next step later than device 0. So `between_steps_us`
    of a device delays the next step only by its excess over the sum of `slack_us` of all earlier devices.

    Args:
        between_steps_us: Time of all-reduces and optimizer steps; the last dimension is the device.
        slack_us: `optimizer_slack_us` of each device's first stage; the last dimension is the device.
    """
    tail: FloatArray = np.zeros(between_steps_us.shape[:-1])
    for k in reversed(range(between_steps_us.shape[-1])):
        tail = delay_with_added_stage_us(tail, between_steps_us[..., k], slack_us[..., k])
    return tail


def shared_costs(
    ties: Sequence[TiedParameters],
    cost: Literal["gradient_bytes", "optimizer_us"],
    first: IntArray | int,
    end: IntArray | int,
) -> FloatArray:
    """Return the costs of parameters that two layers of a stage share. The sum over layers counts them twice.

    Args:
        ties: Shared parameters of the chain.
        cost: Field of `TiedParameters`.
        first: First layer of each stage.
        end: One past the last layer of each stage; arrays are broadcast.
    """
    shared = np.zeros(np.broadcast_shapes(np.shape(first), np.shape(end)))
    for tie in ties:
        shared += np.where((first <= tie.first) & (tie.second < end), getattr(tie, cost), 0.0)
    return shared


@dataclass(frozen=True, kw_only=True)
class ChainSums:
    """Prefix sums of layer costs: entry i is the sum over the layers before layer i."""

    costs: ChainCosts
    forward_us: FloatArray
    backward_us: FloatArray
    optimizer_us: FloatArray
    gradient_bytes: FloatArray
    has_backward: BoolArray
    """Entry i: True if a stage with the last layer i - 1 has a backward."""
    crossing_bytes: FloatArray
    """Entry i: bytes sent over the boundary before layer i for one micro-batch; 0 at both ends of the chain."""
    cluster: Cluster
    replicas: int

    @classmethod
    def of(cls, costs: ChainCosts, cluster: Cluster, replicas: int) -> "ChainSums":
        """Return the prefix sums of the costs of all layers.

        Args:
            costs: Costs of the layers at the micro-batch size.
            cluster: Devices and links.
            replicas: Number of data-parallel pipelines.
        """
        return cls(
            costs=costs,
            forward_us=prefix_sums(costs.forward_us),
            backward_us=prefix_sums(costs.backward_us),
            optimizer_us=prefix_sums(costs.optimizer_us),
            gradient_bytes=prefix_sums(costs.gradients),
            has_backward=np.append(False, costs.has_backward),
            crossing_bytes=np.array([0.0, *costs.boundaries.output[:-1], 0.0]),
            cluster=cluster,
            replicas=replicas,
        )

    def busy_times(
        self,
        first: IntArray,
        end: IntArray,
        recompute: ArrayLike,
        *,
        speed: Numbers,
        recomputed_layers_us: Numbers = 0.0,
    ) -> StageBusyTimes:
        """Return the forward, backward and recomputation times of stages for one micro-batch.

        Args:
            first: First layer of each stage.
            end: One past the last layer of each stage; arrays are broadcast.
            recompute: Recompute choice of each stage: an index into `CHOICES`, or `LAYERS`.
            speed: Speed of the stage's device, relative to the profiled device.
            recomputed_layers_us: Sum of the forward times of the recomputed layers, if the choice is `LAYERS`.
        """
        return busy_times(
            self.forward_us[end] - self.forward_us[first] + self.costs.entry_us[first],
            self.backward_us[end] - self.backward_us[first],
            recompute,
            has_backward=self.has_backward[end],
            recomputed_layers_us=recomputed_layers_us,
            speed=speed,
            overhead_us=self.cluster.overhead_us,
        )

    def split_backward_times(
        self, busy: StageBusyTimes, first: IntArray, end: IntArray, *, speed: Numbers
    ) -> SplitBackwardTimes:
        """Return the times of both passes of a split backward.

        Args:
            busy: Times of the same stages with whole backwards.
            first: First layer of each stage.
            end: One past the last layer of each stage; arrays are broadcast.
            speed: Speed of the stage's device, relative to the profiled device.
        """
        input_us, weight_us = self._split_backward_sums_us
        return split_backward_times(
            busy,
            input_us[end] - input_us[first],
            weight_us[end] - weight_us[first],
            speed=speed,
            overhead_us=self.cluster.overhead_us,
        )

    @cached_property
    def _split_backward_sums_us(self) -> tuple[FloatArray, FloatArray]:
        return prefix_sums(self.costs.split_backward.input_us), prefix_sums(self.costs.split_backward.weight_us)

    def between_steps_us(self, first: IntArray, end: IntArray, speed: Numbers) -> FloatArray:
        """Return the time of each stage's all-reduce and optimizer step, in microseconds.

        Args:
            first: First layer of each stage.
            end: One past the last layer of each stage; arrays are broadcast.
            speed: Speed of the stage's device, relative to the profiled device.
        """
        optimizer_us = self.optimizer_us[end] - self.optimizer_us[first]
        optimizer_us = (optimizer_us - shared_costs(self.costs.ties, "optimizer_us", first, end)) / speed
        return optimizer_us if self.replicas == 1 else optimizer_us + self.gradient_allreduce_us(first, end)

    def gradient_allreduce_us(self, first: IntArray, end: IntArray) -> FloatArray:
        """Return the time of each stage's gradient all-reduce over the replicas, in microseconds."""
        gradient_bytes = self.gradient_bytes[end] - self.gradient_bytes[first]
        unshared_bytes = gradient_bytes - shared_costs(self.costs.ties, "gradient_bytes", first, end)
        return self.cluster.allreduce_us(unshared_bytes, self.replicas)
