"""`gpipe-plan verify` of seven models as pipelines of two CPU processes, before and after calibration.

    python benchmarks/verify.py > docs/measurements/verify.md
    python benchmarks/verify.py transformer_lm     # one model

Prints a Markdown table with its environment. Takes about 25 minutes on a machine that does nothing else meanwhile. On
one that does, a run can take half as long again as the next: each plan is run three times, and the run whose step is
neither the shortest nor the longest is the one that is told.
"""

import argparse
import contextlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import planner
from planner.cli.main import run
from planner.core.judge.verification import ComparedFigure, Verification
from planner.core.values.plan import Plan
from planner.core.values.units import format_us
from planner.device.machine import cpu_name
from planner.files import read_plan, write

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_models"


@dataclass(frozen=True)
class Case:
    """One model and the batch that it is planned for."""

    model: Path
    batch: int
    steps: int = 12


CASES = {
    "transformer_lm": Case(SAMPLES / "transformer_lm.py", 8),
    "amoebanet_d": Case(SAMPLES / "amoebanet_d.py", 16),
    "resnet": Case(SAMPLES / "resnet.py", 8),
    "unet": Case(SAMPLES / "unet.py", 8),
    "GPT-2 of transformers": Case(HERE / "gpt2.py", 8, steps=7),  # of six seconds
    "GRU blocks": Case(HERE / "gru.py", 8),  # micro-batches of milliseconds
    "mlp": Case(SAMPLES / "mlp.py", 64),
}
RUNS = 3


def main() -> None:
    """Run every case and print its row; with names as arguments only those."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES))
    asked = parser.parse_args()
    print("# Predicted and measured: `gpipe-plan verify` of two processes on the CPU\n")
    print(
        f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, ",
        end="",
    )
    print(f"Python {platform.python_version()}, one thread per process.")
    print(f"Load average at the start: {os.getloadavg()[0]:.1f}.")
    print(
        "Each model has two plans for two devices: one under GPipe, and one for which `solve` also chose the\n"
        f"schedule. Each plan was run {RUNS} times. The table has the median step of the median run, and in\n"
        f"parentheses the range of the {RUNS} runs. A difference is (measured - predicted) / predicted. *Calibrated*:\n"
        "the same plan, predicted with a calibration from the median run, and run again.\n"
    )
    print("| model | schedule | cuts, M | step predicted | measured | | calibrated | measured | "
          "| bubble predicted, measured | peak of stage 0, 1 predicted, MiB | measured | |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in asked.names:
            case = CASES[name]
            profile = ("profile", str(case.model), "--batch", str(case.batch), "--quiet")
            subprocess.run([sys.executable, "-m", "planner", *profile], check=True, stdout=sys.stderr)
            for schedule in ("gpipe", "auto"):
                print(f"| {name} | {' | '.join(_row(case, schedule))} |", flush=True)


def _row(case: Case, schedule: str) -> list[str]:
    options = ("--devices", "2", "--mem", "8GB", "--batch", str(case.batch), "--schedule", schedule)
    _quietly("solve", *options)
    plan = read_plan("plan.yaml")
    if plan.num_devices == 1:  # a pipeline is what is to be looked at
        _quietly("solve", *options, "--balance", _two_stages(plan))
        plan = read_plan("plan.yaml")
    cuts = ",".join(map(str, plan.balance))
    first, first_us = _in_the_middle(case.steps)
    write("calibration.yaml", first.calibration)
    fixed = ("--balance", cuts, "--micro-batches", str(plan.micro_batches))
    _quietly("solve", *options, "--schedule", plan.schedule, *fixed, "--calibration", "calibration.yaml")
    second, second_us = _in_the_middle(case.steps)
    bubble = _one(first, "bubble")
    return [
        plan.schedule,
        f"{cuts}; {plan.micro_batches}",
        *_times(first, first_us),
        *_times(second, second_us),
        f"{bubble.predicted:.1%}, {bubble.measured:.1%}",
        *_peaks(first),
    ]


def _two_stages(plan: Plan) -> str:
    layers = sum(plan.balance)
    return f"{layers // 2},{layers - layers // 2}"


def _quietly(*arguments: str) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        code = run([*arguments, "--quiet"])
    if code != 0:
        sys.exit(code)


def _one(found: Verification, what: str) -> ComparedFigure:
    return next(row for row in found.compared if row.what == what)


def _in_the_middle(steps: int) -> tuple[Verification, list[float]]:
    """Run `plan.yaml` a few times; return the run with the median step, and all steps."""
    runs = sorted((planner.verify(steps=steps) for _ in range(RUNS)), key=lambda run: _one(run, "step_us").measured)
    return runs[RUNS // 2], [_one(run, "step_us").measured for run in runs]


def _times(found: Verification, all_us: list[float]) -> list[str]:
    step = _one(found, "step_us")
    measured = f"{format_us(step.measured)} ({format_us(all_us[0])} to {format_us(all_us[-1])})"
    return [format_us(step.predicted), measured, f"{step.measured / step.predicted - 1:+.1%}"]


def _peaks(found: Verification) -> list[str]:
    peaks = [row for row in found.compared if row.what == "peak_bytes"]
    sizes = [", ".join(f"{size / 2**20:.2f}" for size in each) for each in
             ([row.predicted for row in peaks], [row.measured for row in peaks])]  # fmt: skip
    return [*sizes, ", ".join(f"{row.measured / row.predicted - 1:+.1%}" for row in peaks)]


if __name__ == "__main__":
    main()
