"""Unprepared models, trained as pipelines and compared with plain loops.

    python benchmarks/unprepared.py hooks state:moco_queue      # print rows of kinds or models
    python benchmarks/unprepared.py --page docs/measurements/unprepared.md      # write rows of all models to a page

A row is printed, or written with the counts of the page, as soon as its model is done. The other rows of the page stay.
Exits with 1 where a model trains wrongly, dies after `profile` has passed it, or is refused without saying what to do.
All models take about an hour on one core.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from planner.device.machine import cpu_name  # noqa: E402
from tests.zoo.unprepared import UnpreparedModel, unprepared_models  # noqa: E402
from tests.zoo.unprepared.running import MICRO_BATCH_SIZE, MICRO_BATCHES, STEPS, Outcome, try_model  # noqa: E402

_TEXT = """\
# Unprepared models

`python benchmarks/unprepared.py` on {cpu}, {cores} cores, torch {torch},
Python {python}. {models} small models as users write them (`tests/zoo/unprepared`). Each is profiled, including the
equivalence check. A model that is not refused is trained as a pipeline of two and of three stages, without
recomputation (1F1B) and, if the profile allows it, with recomputation (GPipe). It is also trained on two devices with
split backward (ZB-V, or ZB-H1 if it has fewer than four layers). Each run has {steps} steps of {micro_batches}
micro-batches of {size} samples, and each rank its own process. A plain PyTorch loop in another process trains the same
micro-batches.

The error is the largest difference of a loss, relative to the loss, or of a final parameter or buffer, relative to its
change during the run. A model is right if its error is at most 1e-4, or at most ten times the difference that a
rounding error in the initial parameters makes in the plain loop. A model is refused if `profile` refuses it, with the
reason and a remedy. Files of the kind `loops` add code to the training loop. `profile` does not run this loop, so only
training can refuse them.

{right} models are right, {refused} are refused, {wrong} are wrong, {late} fail only in training, {unhelpful} are
refused without a remedy. Of the right models, {removed} lost some cuts, and {kept} must not be recomputed.

The last column is the commit on which a row was measured. Rows per commit: {commits}.{older}

| kind | model | verdict | error | pipelines | profile | problem | commit |
|---|---|---|---|---|---|---|---|"""

_OLDER = """
Rows of a commit `before X` were measured on an earlier tree than X and on another CPU, some of them without the V.
They quote the messages of that tree."""

_GOOD = ("right", "refused")


def main() -> int:
    """Try the models, and print their rows or write them to a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="*", help="kinds, or models as kind:name; by default all")
    parser.add_argument("--page", type=Path, help="Markdown page to write the rows to, with new counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = unprepared_models()
    which = set(options.which)
    models = [m for m in known if not which or which & {m.kind, f"{m.kind}:{m.name}"}]
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.check_output(command, text=True, cwd=ROOT).strip()
    verdicts = []
    for number, model in enumerate(models, start=1):
        begin = time.monotonic()
        outcome = try_model(model)
        verdicts.append(outcome.verdict)
        row = _row(model, outcome, commit)
        if options.page is not None:
            rows = {**_rows(options.page), (model.kind, model.name): row}
            options.page.write_text(_page(rows), encoding="utf-8")
        else:
            print(row, flush=True)
        took = f"{outcome.verdict}, {time.monotonic() - begin:.0f} s"
        print(f"[{number}/{len(models)}] {model.kind}:{model.name}: {took}", file=sys.stderr, flush=True)
    return int(any(verdict not in _GOOD for verdict in verdicts))


def _rows(page: Path) -> dict[tuple[str, str], str]:
    """Return the rows of a page by kind and name of the model."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    return {(_cells(line)[0], _cells(line)[1]): line for line in lines if line.startswith("| ")}


def _cells(row: str) -> list[str]:
    return row.removeprefix("| ").removesuffix(" |").split(" | ")


def _page(rows: dict[tuple[str, str], str]) -> str:
    """Return the page with rows of models that exist, in their order, and with their counts."""
    known = [rows[model.kind, model.name] for model in unprepared_models() if (model.kind, model.name) in rows]
    cells = [_cells(row) for row in known]
    verdicts = Counter(verdict for _, _, verdict, *_ in cells)
    profiled = [said for _, _, verdict, _, _, said, *_ in cells if verdict == "right"]
    commits = Counter(commit for *_, commit in cells)
    text = _TEXT.format(
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        python=platform.python_version(),
        models=len(known),
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        size=MICRO_BATCH_SIZE,
        right=verdicts["right"],
        refused=verdicts["refused"],
        wrong=verdicts["wrong"],
        late=verdicts["died late"],
        unhelpful=verdicts["unhelpful"],
        removed=sum("cannot be cut" in said for said in profiled),
        kept=sum("recomputed stages" in said for said in profiled),
        commits=", ".join(f"{count} of {commit}" for commit, count in commits.most_common()),
        older=_OLDER if any(commit.startswith("before") for commit in commits) else "",
    )
    return "\n".join([text, *known, ""])


def _row(model: UnpreparedModel, outcome: Outcome, commit: str) -> str:
    error = f"{outcome.error:.0e}" if outcome.runs and outcome.verdict in ("right", "wrong") else ""
    runs = str(len(outcome.runs) or "")
    cells = (model.kind, model.name, outcome.verdict, error, runs, outcome.profiled, outcome.problem, commit)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
