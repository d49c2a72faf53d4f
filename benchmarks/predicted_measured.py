"""Predicted beside measured on this machine: sample models as pipelines of two CPU processes, each recomputation.

    python benchmarks/predicted_measured.py > docs/measurements/cpu.md

Prints a Markdown table with its environment. Memory is the allocator's own count in the second step, time the median of
the steps after it. Takes about three minutes; on a machine that does something else meanwhile the times mean little.
"""

import contextlib
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from planner.cli.main import run
from planner.core.values.plan import Plan
from planner.core.values.run_report import RunReport
from planner.device.machine import cpu_name
from planner.files import read_plan, read_run

SAMPLES = Path(__file__).parents[1] / "sample_models"
CASES = {"transformer_lm": "6,4", "amoebanet_d": "4,8", "resnet": "8,10", "mlp": "9,8"}
STEPS = "15"


def main() -> None:
    """Runs every case and prints its row."""
    print("# Predicted and measured: two processes on the CPU, GPipe, M = 4, mini-batch 8\n")
    print(f"`python benchmarks/predicted_measured.py` on {cpu_name()}, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread per process.")
    print("Differences are measured against predicted.\n")
    print("| model | cuts | recompute | step predicted | measured | | peak of stage 0, 1 predicted | measured | |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for model, balance in CASES.items():
            _quietly("profile", str(SAMPLES / f"{model}.py"))
            for recompute in ("never", "except-last", "always"):
                _quietly("solve", "--devices", "2", "--mem", "8GB", "--micro-batches", "4", "--balance", balance,
                         "--recompute", recompute)  # fmt: skip
                _quietly("emit", "--force")
                _train()
                cells = _cells(read_plan("plan.yaml"), read_run("run.json"))
                print(f"| {model} | {balance} | {recompute} | {' | '.join(cells)} |", flush=True)


def _quietly(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = run([*arguments, "--quiet"])
    if code != 0:
        sys.exit(code)


def _train() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--steps", STEPS, "--report", "run.json"]
    subprocess.run([*command, *arguments], env=environment, check=True, capture_output=True)


def _cells(plan: Plan, report: RunReport) -> Iterator[str]:
    predicted_us = plan.predicted.step_us
    measured_us = statistics.median(report.step_us[report.warmup_steps :])
    yield from (f"{predicted_us / 1e3:.1f} ms", f"{measured_us / 1e3:.1f} ms", f"{measured_us / predicted_us - 1:+.1%}")
    predicted = [stage.memory.total for stage in plan.stages]
    measured = [stage.peak_bytes for stage in report.stages]
    yield ", ".join(f"{size / 2**20:.2f}" for size in predicted) + " MiB"
    yield ", ".join(f"{size / 2**20:.2f}" for size in measured) + " MiB"
    yield ", ".join(f"{m / p - 1:+.1%}" for p, m in zip(predicted, measured, strict=True))


if __name__ == "__main__":
    main()
