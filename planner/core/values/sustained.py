"""FLOP/s that GPUs reached in published training runs: defaults for GPUs that this machine lacks.

`docs/measurements/published.md`, section "Rates that were reached", names all runs and their sources. Each rate here is
the median of its sources' medians. `tests/unit/test_published.py` computes them from the published figures.
"""

from dataclasses import dataclass, replace
from typing import Final

_CHIPS: Final = {"a100-40gb": "A100", "a100-80gb": "A100", "h100": "H100", "h200": "H100", "gb200": "GB200"}
"""Value of `SustainedRate.chip` for each accelerator. An H200 has the cores of an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedRate:
    """Half-precision FLOP/s that a GPU reached in training, without the time of tensor-parallel all-reduces."""

    chip: str
    experts: bool = False
    """True for a mixture of experts."""
    flops_per_s: float
    errors: str
    """Key of the rate's error range in `planner.core.judge.certainty.STEP_ERRORS`; empty if the range is unknown."""


SUSTAINED: Final = (
    SustainedRate(chip="A100", flops_per_s=182e12, errors="A100"),
    SustainedRate(chip="H100", flops_per_s=433e12, errors="H100"),
    SustainedRate(chip="H100", experts=True, flops_per_s=282e12, errors="few runs"),
    SustainedRate(chip="GB200", flops_per_s=916e12, errors="few runs"),
    SustainedRate(chip="GB200", experts=True, flops_per_s=919e12, errors="few runs"),
)
"""Rates of published runs, by chip and kind of model; all are in half precision."""


_PRODUCTS: Final = {"H100": 700e12}
"""Half-precision FLOP/s of matrix products alone, by chip; docs/measurements/gpu.md has times on an H200."""


def matmul_flops_per_s(name: str) -> float | None:
    """Return the half-precision FLOP/s of matrix products alone on an accelerator (`h100`); None if not measured."""
    return _PRODUCTS.get(_CHIPS.get(name, ""))


def sustained_rate(name: str, *, experts: bool = False) -> SustainedRate | None:
    """Return the rate that an accelerator (`h100`) reached in published runs; None if there are no such runs.

    With `experts`, runs of mixtures of experts are preferred to runs of other models.
    """
    of_chip = [each for each in SUSTAINED if each.chip == _CHIPS.get(name)]
    same = next((each for each in of_chip if each.experts == experts), None)
    if same is not None or not of_chip:
        return same
    return replace(of_chip[0], errors="")
