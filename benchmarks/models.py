"""Real models cut into stages, compared with the unpartitioned model: loss, every gradient, every buffer.

    python benchmarks/models.py > docs/measurements/models.md
    python benchmarks/models.py --model FCOS --model "GPT-2 with LoRA"

Prints a Markdown table with its environment; exits with 1 if a model is off by more than 1e-4, fails, or is refused
that should not be. Takes about 20 minutes and needs `transformers` and `timm`.
"""

import argparse
import os
import platform
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.core.errors import ModelError
from planner.core.values.profile import Granularity
from planner.device.machine import cpu_name
from planner.executor.equivalence.check import check_equivalence
from planner.model import LoadedModel
from planner.profile.units import layer_digests
from tests.support.apart import Differences, Whole, compare_apart, even_cuts
from tests.zoo.real_models import REAL_MODELS, RealModel

LIMIT = 1e-4

_LEGEND = """\
{models} small models with random weights. Each is cut into three stages of nearly equally many layers, and into one
stage per layer, with coarse and fine granularity and two micro-batches in flight. The three coarse stages are built
separately, as their ranks build them.

- *Tensors*: smallest and largest number of tensors at a boundary (coarse), including integers that later layers read.
- *Loss*, *gradients*, *buffers*: largest error of all these cuts, relative to the unpartitioned model. After a slash:
  number of gradients, and of buffers that a step changes.
- *Recomputed*: largest of these three errors if each of the three stages is recomputed.
- *Check*: result of the equivalence check of `gpipe-plan profile` (coarse): covered cuts, largest relative error, CPU
  time of all processes.
- *CPU time*: to find the layers (coarse), and for a step of the unpartitioned model.
"""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row."""

    family: str
    caveat: str
    layers: tuple[int, ...] = ()
    """Coarse, and fine."""
    tensors: tuple[int, ...] = ()
    """That cross each boundary, coarse."""
    kept: Differences | None = None
    """The worst of all ways to cut it, nothing recomputed."""
    recomputed: Differences | None = None
    """The same, whole stages recomputed."""
    seconds: float = 0.0
    """CPU time to find the layers, coarse, and for a step in one piece."""
    guard: str = ""
    """What the equivalence check finds: covered cuts, the largest relative error, CPU time."""
    refusal: str = ""
    """Why the model is refused, and what to do."""
    failure: str = ""
    """What went wrong that should not have."""

    @property
    def kind(self) -> str:
        """Result's kind."""
        if self.failure:
            return "failed"
        if self.refusal:
            return "refused, as they must be"
        worst = max(d.worst for d in (self.kept, self.recomputed) if d is not None)
        return "trained as the unpartitioned model does" if worst <= LIMIT else "trained wrongly"

    @property
    def cells(self) -> dict[str, str]:
        """Cells by column."""
        # In one line, whatever torch says.
        said = " ".join((self.failure or self.refusal).split()).replace("|", "\\|")
        what = f"{self.kind}: {said}" if said else ""
        return {
            "family": self.family,
            "layers, coarse": _number(self.layers[:1]),
            "fine": _number(self.layers[1:]),
            "tensors": _range(self.tensors),
            "loss": _error(self.kept and self.kept.loss),
            "gradients": _error(self.kept and self.kept.gradient, self.kept and self.kept.num_gradients),
            "buffers": _error(self.kept and self.kept.buffer, self.kept and self.kept.num_buffers),
            "recomputed": _error(self.recomputed and self.recomputed.worst),
            "check": self.guard,
            "CPU time": f"{self.seconds:.2f} s" if self.seconds else "",
            "caveat": "; ".join(filter(None, (self.caveat, what))),
        }


def main() -> None:
    """Print one row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(REAL_MODELS), metavar="NAME", help="only this one")
    names = parser.parse_args().model or list(REAL_MODELS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _print_head(names)
    counts = Counter(_printed(name) for name in names)
    print(f"\n{len(names)} models: {', '.join(f'{number} {kind}' for kind, number in counts.items())}.")
    sys.exit(1 if counts["failed"] or counts["trained wrongly"] else 0)


def _print_head(names: Sequence[str]) -> None:
    print("# Real models as chains\n")
    print(f"`python benchmarks/models.py` on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"transformers {version('transformers')}, timm {version('timm')}, Python {platform.python_version()}.")
    print(_LEGEND.format(models=len(names)))
    columns = Compared(family="", caveat="", failure="-").cells
    print(f"| model | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")


def _printed(name: str) -> str:
    """Print a model's row, and return its kind."""
    print(name, file=sys.stderr, flush=True)
    compared = _compared(REAL_MODELS[name])
    print(f"| {name} | {' | '.join(compared.cells.values())} |", flush=True)
    return compared.kind


def _compared(real: RealModel) -> Compared:
    row = Compared(family=real.family, caveat=real.caveat)
    try:
        for granularity in ("coarse", "fine"):
            row = _with(row, real, "fine" if granularity == "fine" else "coarse")
    except ModelError as error:
        said = f"{error} ({error.hint})"
        expected = bool(real.refusal) and real.refusal in said and bool(error.hint)
        return replace(row, refusal=said) if expected else replace(row, failure=f"refused: {said}")
    except Exception as error:  # whatever it is, the other models are compared
        return replace(row, failure=f"{type(error).__name__}: {error}"[:300])
    return replace(row, failure=f'not refused ("{real.refusal}")') if real.refusal else row


def _with(row: Compared, real: RealModel, granularity: Granularity) -> Compared:
    """Return `row` with the results of one more granularity."""
    torch.manual_seed(0)
    begin = time.process_time()
    whole = Whole.of(real, granularity)
    seconds = time.process_time() - begin
    num_layers = len(whole.chain.layers)
    few, many = even_cuts(num_layers), list(range(num_layers + 1))
    row = replace(row, layers=(*row.layers, num_layers))
    if granularity == "coarse":
        outline = whole.chain.outline
        tensors = [1] if outline is None else [len(values) for values in outline.crossings]
        row = replace(row, seconds=seconds, tensors=tuple(tensors))
        row = replace(row, guard=_guarded(whole.loaded))
    together = granularity == "fine"
    kept = [compare_apart(whole, many, together=True)]
    if granularity == "coarse":
        kept.append(compare_apart(whole, few))
    recomputed = compare_apart(whole, few, "always", together=together)
    return replace(row, kept=_worst(row.kept, *kept), recomputed=_worst(row.recomputed, recomputed))


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it has waited for."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _guarded(loaded: LoadedModel) -> str:
    begin = _cpu_seconds()
    found = check_equivalence(loaded, budget_s=90.0, digests=layer_digests)
    seconds = _cpu_seconds() - begin
    proof = found.proof
    if not proof.cuts:
        return f"{proof.reason} ({seconds:.1f} s)"
    text = f"{proof.cuts} cuts, {proof.worst:.0e}, {seconds:.1f} s"
    if found.loaded.uncut:
        text += f"; taken out: {len(found.loaded.uncut)}"
    if proof.reason:
        text += f"; {proof.reason}"
    return f"{text}; recomputed: {proof.differs_recomputed}" if proof.differs_recomputed else text


def _worst(*differences: Differences | None) -> Differences:
    """Return the largest difference of each kind."""
    some = [d for d in differences if d is not None]
    return replace(
        some[0],
        loss=max(d.loss for d in some),
        gradient=max(d.gradient for d in some),
        buffer=max(d.buffer for d in some),
    )


def _number(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    few, many = min(numbers), max(numbers)
    return f"{few} to {many}" if few < many else f"{few}"


def _error(error: float | None, count: int | None = None) -> str:
    if error is None or count == 0:
        return ""
    return f"{error:.0e}" if count is None else f"{error:.0e} / {count}"


if __name__ == "__main__":
    main()
