"""Unprepared models, trained as pipelines and compared with plain loops.

    python benchmarks/unprepared.py > docs/measurements/unprepared.md
    python benchmarks/unprepared.py hooks state:moco_queue      # kinds or models

Exits with 1 where a model trains wrongly, dies after `profile` has passed it, or is refused without saying what to do.
Takes about 40 minutes on two cores.
"""

import argparse
import os
import platform
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from planner.device.machine import cpu_name  # noqa: E402
from tests.zoo.unprepared import UnpreparedModel, unprepared_models  # noqa: E402
from tests.zoo.unprepared.running import MICRO_BATCH_SIZE, MICRO_BATCHES, STEPS, Outcome, try_model  # noqa: E402

_TEXT = """\
# Models that nothing was prepared for

`python benchmarks/unprepared.py` on {cpu}, {cores} cores, torch {torch},
Python {python}. {models} small models as users write them (`tests/zoo/unprepared`). Each is profiled, check
included. A model that is not refused is trained as a pipeline of two stages and of three, without recomputation (1F1B)
and, where the profile allows it, with recomputation (GPipe); and as a V of two devices with split backwards (ZB-V,
or ZB-H1 if there are fewer than four layers): {steps} steps of {micro_batches} micro-batches of {size} samples,
each rank in a process of its own. A plain PyTorch loop in another process trains the same micro-batches.

Error: the largest difference of a loss, relative to the loss, or of a parameter or buffer at the end, relative to how
far it moved. A model is right if that is at most 1e-4, or at most ten times what the plain loop makes of a rounding
error in its initial parameters. A model is refused if `profile` says no, and what to do.

{right} are right, {refused} refused, {wrong} wrong, {late} died late, {unhelpful} were refused without help. Of
those that are right, {removed} lost some cuts, and {kept} must not be recomputed.

| kind | model | verdict | error | pipelines | profile | problem |
|---|---|---|---|---|---|---|"""

_GOOD = ("right", "refused")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="*", help="kinds, or models as kind:name; by default all")
    which = parser.parse_args().which
    models = [m for m in unprepared_models() if not which or m.kind in which or f"{m.kind}:{m.name}" in which]
    outcomes = []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for number, (model, outcome) in enumerate(zip(models, pool.map(_tried, models), strict=True), start=1):
            outcomes.append(outcome)
            details = "" if outcome.verdict == "right" else f" {outcome.problem} | {outcome.profiled}"
            sys.stderr.write(f"[{number}/{len(models)}] {model.kind}:{model.name} {outcome.verdict}{details}\n")
    print(_page(models, outcomes))
    return int(any(outcome.verdict not in _GOOD for outcome in outcomes))


def _tried(model: UnpreparedModel) -> Outcome:
    torch.set_num_threads(1)
    return try_model(model)


def _page(models: list[UnpreparedModel], outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    right = [outcome for outcome in outcomes if outcome.verdict == "right"]
    removed = sum("cannot be cut" in outcome.profiled for outcome in right)
    kept = sum("recomputed stages" in outcome.profiled for outcome in right)
    rows = [_row(model, outcome) for model, outcome in zip(models, outcomes, strict=True)]
    text = _TEXT.format(
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        models=len(models),
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        size=MICRO_BATCH_SIZE,
        right=counts["right"],
        refused=counts["refused"],
        wrong=counts["wrong"],
        late=counts["died late"],
        unhelpful=counts["unhelpful"],
        removed=removed,
        kept=kept,
    )
    return "\n".join([text, *rows])


def _row(model: UnpreparedModel, outcome: Outcome) -> str:
    error = f"{outcome.error:.0e}" if outcome.runs and outcome.verdict in ("right", "wrong") else ""
    runs = str(len(outcome.runs) or "")
    cells = (model.kind, model.name, outcome.verdict, error, runs, outcome.profiled, outcome.problem)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
