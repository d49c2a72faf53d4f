"""What to recompute on one device so that it fits its cap: whole stages, or single layers where that takes less time.

Here for devices with one stage whose moments are known in closed form; for all others in `chunks_of_device.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.memory import interval_totals
from planner.core.cost.stage_time import CHOICES, LAYERS
from planner.solve.layers.exact_stages import LayerTimes
from planner.solve.space.arrays import IntArray
from planner.solve.space.partitions import Many


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the chunks of one device recompute."""

    choices: tuple[int, ...]
    """Per chunk an index into `CHOICES`, or `LAYERS`."""
    recomputed: tuple[tuple[int, ...], ...]
    """Per chunk the single layers, counted along the chain."""
    layers_us: tuple[float, ...]
    """Per chunk their forward on the profiled device."""
    again_us: float
    """What the device computes again in a step, on the profiled device."""
    over_bytes: float
    """By how much it is over its cap; 0 where it fits."""


class Devices(Protocol):
    """Answers for the devices of one pipeline."""

    @property
    def num_solved(self) -> int:
        """Walks through the layers of a stage so far: what takes long."""

    def ways(self, device: int, cuts: IntArray) -> tuple[Recomputation, ...]:
        """What `device` may recompute, what takes the least time first; or what is over by least.

        Args:
            device: Of the pipeline.
            cuts: Shape (S+1,).
        """

    def near(self, device: int, cuts: IntArray, choices: Sequence[int]) -> Recomputation:
        """What `device` recomputes if it begins with `choices` for the whole stages of its chunks."""


class DevicesOfOneStage:
    """Devices with one stage each whose moments are known in closed form: every answer is exact.

    Args:
        many: The partitions.
        layers: Exact choices of layers, which it shares with a programme over all partitions.
    """

    def __init__(self, many: Many, layers: LayerTimes) -> None:
        self._many, self._layers = many, layers
        self._answers: dict[tuple[int, int, int], tuple[Recomputation, ...]] = {}

    @property
    def num_solved(self) -> int:
        """The number of stages solved exactly."""
        return self._layers.num_exact

    def ways(self, device: int, cuts: IntArray) -> tuple[Recomputation, ...]:
        """Every way that fits, or is over by least."""
        key = device, int(cuts[device]), int(cuts[device + 1])
        if key not in self._answers:
            self._answers[key] = self._ways(*key)
        return self._answers[key]

    def near(self, device: int, cuts: IntArray, choices: Sequence[int]) -> Recomputation:  # noqa: ARG002 - one is best
        """What is best whatever it begins with."""
        return self.ways(device, cuts)[0]

    def _ways(self, device: int, first: int, end: int) -> tuple[Recomputation, ...]:
        case, allowed = self._many.case, self._many.allowed
        moments, cap = case.moments(self._many.num_devices - 1 - device), case.caps_bytes[device]
        choices = [CHOICES[n] for n in allowed]
        totals = interval_totals(case.costs, np.array([first]), end, moments, choices=choices)
        again_us = whole_again_us(case.costs, first, end, case.micro_batches)
        ways = [
            _of_one(n, again_us[n], max(0.0, float(total[0, -1]) - cap))
            for n, total in zip(allowed, totals, strict=True)
        ]
        if ways[0].over_bytes == 0:
            return (ways[0],)
        exact = self._layers.exact(first, end, cap, moments)
        if exact is not None and exact.recomputed:
            again = case.micro_batches * exact.again_us
            ways.append(_of_one(LAYERS, again, 0.0, recomputed=exact.recomputed, layers_us=exact.again_us))
        return best_first(dict.fromkeys(ways))


def _of_one(
    choice: int, again_us: float, over_bytes: float, *, recomputed: tuple[int, ...] = (), layers_us: float = 0.0
) -> Recomputation:
    return Recomputation(
        choices=(choice,),
        recomputed=(recomputed,),
        layers_us=(layers_us,),
        again_us=again_us,
        over_bytes=over_bytes,
    )


def best_first(ways: Iterable[Recomputation]) -> tuple[Recomputation, ...]:
    """The ways that fit, what takes the least time first; or those that are over by least."""
    ordered = sorted(ways, key=lambda way: (way.over_bytes, way.again_us))
    return tuple(way for way in ordered if way.over_bytes == ordered[0].over_bytes)


def whole_again_us(costs: ChainCosts, first: int, end: int, micro_batches: int) -> tuple[float, ...]:
    """What computing the whole stage again takes in a step, for each of `CHOICES`."""
    forward_us = float(costs.forward_us[first:end].sum()) if costs.has_backward[end - 1] else 0.0
    return 0.0, (micro_batches - 1) * forward_us, micro_batches * forward_us
