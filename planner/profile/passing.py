"""What it takes a stage to get past the modules in front of it, which every layer measured alone pays for.

A stage of several layers passes over what lies in front of them once. That is taken off the time of each layer, so that
layers add up to stages and to the model.
"""

from collections.abc import Mapping

from torch.utils._pytree import tree_unflatten

from planner.device.clock import Clock
from planner.model.stage import ModelStage
from planner.profile.units import Unit, UnitInput

__all__ = ["passing_us"]


def passing_us(
    units: Mapping[str, Unit], inputs: Mapping[tuple[str, int], UnitInput], *, clock: Clock, repeats: int
) -> dict[tuple[str, int], float]:
    """By (unit digest, micro-batch size); 0 for the layers of a Sequential, which have nothing to pass over."""
    return {key: _passing_us(units[key[0]], received, clock, repeats) for key, received in inputs.items()}


def _passing_us(unit: Unit, received: UnitInput, clock: Clock, repeats: int) -> float:
    stage = unit.module
    if not isinstance(stage, ModelStage):
        return 0.0
    value = tree_unflatten(received.fresh(), received.spec)
    return clock.typical_us([clock.time_us(lambda: stage.pass_over(value)) for _ in range(repeats + 1)][1:])
