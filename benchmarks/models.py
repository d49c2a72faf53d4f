"""Real models cut into three stages, compared with the model in one piece: loss and every gradient.

    python benchmarks/models.py > docs/measurements/models.md

Prints a Markdown table with its environment; exits with 1 if a model is off by more than 1e-4. Takes a few minutes and
needs `transformers` and `timm`.
"""

import os
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.core.errors import ModelError
from planner.model.machine import cpu_name
from tests.support.cutting import Compared, compare
from tests.support.real_models import REAL_MODELS, RealModel, loss_of

LIMIT = 1e-4


def main() -> None:
    """One row per model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("# Real models as chains\n")
    print(f"`python benchmarks/models.py` on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"transformers {version('transformers')}, timm {version('timm')}, Python {platform.python_version()}.")
    print(
        "Small models with random weights, each cut into three stages of about as many layers and run with two\n"
        "micro-batches in flight. Tensors: how many cross the boundaries between layers (coarse), fewest to most,\n"
        "integers that later layers read included. Errors: relative to the model in one piece, of the loss and of the\n"
        "gradient that is furthest off, the larger of coarse and fine cuts. CPU time: to find the layers (coarse).\n"
    )
    print("| model | family | layers, coarse | fine | tensors | loss error | gradient error | CPU time | caveat |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = [_row(name, real) for name, real in REAL_MODELS.items()]
    sys.exit(0 if all(rows) else 1)


def _row(name: str, real: RealModel) -> bool:
    torch.manual_seed(0)
    try:
        coarse = compare(real.build(), real.inputs, loss_of, granularity="coarse", sizes=(3, 2))
        fine = compare(real.build(), real.inputs, loss_of, granularity="fine", sizes=(3, 2))
    except ModelError as error:
        print(f"| {name} | {real.family} | | | | | | | {error} |", flush=True)
        return False
    losses, gradients = _errors(coarse, fine)
    crossing = sorted(coarse.crossing)
    tensors = f"{crossing[0]} to {crossing[-1]}" if crossing[0] < crossing[-1] else f"{crossing[0]}"
    layers = f"{len(coarse.chain.layers)} | {len(fine.chain.layers)}"
    print(
        f"| {name} | {real.family} | {layers} | {tensors} | {losses:.0e} | {gradients:.0e} | "
        f"{coarse.seconds:.2f} s | {real.caveat} |",
        flush=True,
    )
    return losses <= LIMIT and gradients <= LIMIT


def _errors(*compared: Compared) -> tuple[float, float]:
    return max(c.loss_error for c in compared), max(c.gradient_error for c in compared)


if __name__ == "__main__":
    main()
