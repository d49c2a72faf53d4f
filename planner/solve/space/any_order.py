"""Lower bound of the step time for all cuts and action orders. It follows from layer times and memory limits.

    T       step time
    M, K    number of micro-batches, number of devices of a pipeline
    F, B    forward time of a layer; its backward time, split or not
    a       bytes that a layer saves for the backward of a micro-batch
    D       least time from the forward of a layer to the end of its input gradient: sum of F and of input-gradient
            times over all layers from this one to the last
    r       share of the micro-batches for which the layer is recomputed, from 0 to 1
    speed   speed of a device, relative to the profiled device

Every layer is on one device. For q = 0, 1, …, some device therefore has at least q + 1 of the q K + 1 longest layers:

    T >= M * sum of F + B over the q + 1 shortest of these q K + 1 layers

A layer that is not recomputed occupies `a` bytes during D, for each micro-batch. The sum of a D is at most the free
memory of all devices times T, and the sum of all work is at most the time T on all devices:

    T * (sum of limits - sum of parameters, gradients, optimizer states) >= M * sum of (1 - r) a D
    T * sum of speeds >= M * sum of (F + B + r F) + sum of optimizer steps

The smallest T results if the layers with the smallest F / (a D) are recomputed first. Because r may be any share, the
bound holds for any recomputation: of whole stages, for all micro-batches or all but the last, or of some layers.
"""

from typing import TYPE_CHECKING

import numpy as np

from planner.core.cost.arrays import FloatArray
from planner.core.cost.chain_costs import ChainCosts

if TYPE_CHECKING:
    from planner.solve.space.case import Case

_ROUNDED_BYTES = 64.0
"""Tolerance in bytes per layer, because the memory model rounds every component."""

_SAFE = 1 - 1e-9
"""Factor that lowers the bound, because sums are rounded."""

_HALVINGS = 50
"""Number of steps of the binary search for the lower bound of the step time."""


def least_us_in_any_order(case: "Case") -> float:
    """Return a lower bound of the step time for all cuts and action orders, in microseconds."""
    pair_us = case.micro_batches * (case.costs.forward_us + case.least_backward_us) / case.highest_speed
    return max(_busiest_device_us(pair_us, case.num_devices), _least_recomputation_us(case)) * _SAFE


def _busiest_device_us(layer_us: FloatArray, num_devices: int) -> float:
    longest_first = np.sort(layer_us)[::-1]
    rounds = range((len(layer_us) - 1) // num_devices + 1)
    return max(float(longest_first[q * num_devices - q : q * num_devices + 1].sum()) for q in rounds)


def least_saved_bytes(costs: ChainCosts) -> FloatArray:
    """Return a lower bound of the bytes that each layer stores from its forward to the end of its backward."""
    # With exact memory records, the input of a layer is not counted, because another layer may store it.
    saved, levels = costs.memory.saved, costs.memory
    if costs.exact:
        saved = np.minimum(levels.internal, levels.backward - levels.output_in_backward - (np.cumsum(saved) - saved))
    return np.where(costs.has_backward, np.maximum(saved, 0.0), 0.0)


def _least_recomputation_us(case: "Case") -> float:
    costs, num = case.costs, case.micro_batches
    if costs.memory_model is not None:
        return 0.0  # the memory model of compiled programs
    speeds = sum(case.cluster.speed(d) for d in range(case.num_devices))
    optimizer_us = costs.optimizer_us.sum() - sum(tie.optimizer_us for tie in costs.ties)
    work_us = float(num * (costs.forward_us + case.least_backward_us).sum() + optimizer_us) / speeds
    state = costs.state.always if costs.exact else costs.state.always + costs.gradients
    shared = sum(tie.parameter_bytes + tie.gradient_bytes + tie.optimizer_bytes for tie in costs.ties)
    room = sum(case.limits_bytes) - float(state.sum()) + shared + _ROUNDED_BYTES * costs.num_layers
    gradient_us = costs.backward_us
    if case.schedule.splits_backward:
        gradient_us = np.minimum(gradient_us, costs.split_backward.input_us)
    stay_us = np.cumsum((costs.forward_us + gradient_us)[::-1])[::-1] / case.highest_speed
    held = num * least_saved_bytes(costs) * stay_us
    if room <= 0 or held.sum() <= work_us * room:
        return work_us
    again_us = np.where(held > 0, num * costs.forward_us / speeds, 0.0)
    order = np.argsort(again_us / np.maximum(held, 1e-30))
    saved, longer_us = (np.concatenate([[0.0], np.cumsum(each[order])]) for each in (held, again_us))
    low_us, high_us = work_us, work_us + float(again_us.sum())
    if case.policy == "never":
        return float(held.sum()) / room
    for _ in range(_HALVINGS):
        middle_us = (low_us + high_us) / 2
        least_us = work_us + np.interp(held.sum() - middle_us * room, saved, longer_us)
        low_us, high_us = (middle_us, high_us) if middle_us < least_us else (low_us, middle_us)
    return low_us
