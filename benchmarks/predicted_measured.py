"""Predicted beside measured on this machine: sample models as pipelines of two CPU processes, each recomputation.

    python benchmarks/predicted_measured.py > docs/measurements/cpu.md
    python benchmarks/predicted_measured.py --schedules > docs/measurements/schedules-cpu.md

`--schedules`: under every schedule there is, in the cuts that `solve` chooses for it.

Prints a Markdown table with its environment. Memory is the allocator's own count in the second step, time the median of
the steps after it. What others do on the machine comes and goes by minutes, so without `--schedules` everything is done
in three rounds, from the profile on, and of each row the round is told in which measured over predicted is neither the
smallest nor the largest; beside it from where to where all lay. Takes about nine minutes.
"""

import argparse
import contextlib
import io
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import torch

from planner.cli.main import run
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.plan import Plan
from planner.core.values.run_report import RunReport
from planner.device.machine import cpu_name
from planner.files import read_plan, read_run

SAMPLES = Path(__file__).parents[1] / "sample_models"
CASES = {"transformer_lm": "6,4", "amoebanet_d": "4,8", "resnet": "8,10", "mlp": "9,8"}
SCHEDULED = ("transformer_lm", "resnet", "gpt2")
STEPS = "15"
ROUNDS = 3


def main() -> None:
    """Run every case and print its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", action="store_true", help="every schedule")
    given = parser.parse_args()
    what = "every schedule, M = 8, mini-batch 16" if given.schedules else "GPipe, M = 4, mini-batch 8"
    print(f"# Predicted and measured: two processes on the CPU, {what}\n")
    command = shlex.join(["python", *sys.argv])
    print(f"`{command}` on {cpu_name()}, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread per process.")
    print("A difference is (measured - predicted) / predicted.", end="\n\n" if given.schedules else "\n")
    if not given.schedules:
        print(f"Profiles and runs were made in {ROUNDS} rounds, one after the other. A row shows the round with the")
        print("median difference of the step, and in parentheses the range of all rounds.\n")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _print_schedules() if given.schedules else _print_recomputation()


def _print_recomputation() -> None:
    print("| model | cuts | recompute | step predicted | measured | | peak of stage 0, 1 predicted | measured | |")
    print("|---|---|---|---|---|---|---|---|---|")
    rounds = [_round() for _ in range(ROUNDS)]
    for (model, recompute), *runs in zip(rounds[0], *(each.values() for each in rounds), strict=True):
        step_us, measured_us, difference, *peaks = _cells(*sorted(runs, key=lambda run: _difference(*run))[ROUNDS // 2])
        every = [_difference(*run) for run in runs]
        difference += f" ({min(every):+.1%} to {max(every):+.1%})"
        print(f"| {model} | {CASES[model]} | {recompute} | {' | '.join((step_us, measured_us, difference, *peaks))} |")


def _round() -> dict[tuple[str, str], tuple[Plan, RunReport]]:
    """Return plans and reports by model and recomputation."""
    runs = {}
    for model, balance in CASES.items():
        _quietly("profile", str(SAMPLES / f"{model}.py"))
        for recompute in ("never", "except-last", "always"):
            _quietly("solve", "--devices", "2", "--mem", "8GB", "--micro-batches", "4", "--balance", balance,
                     "--schedule", "gpipe", "--recompute", recompute)  # fmt: skip
            _quietly("emit", "--force")
            _train()
            runs[model, recompute] = read_plan("plan.yaml"), read_run("run.json")
    return runs


def _print_schedules() -> None:
    print("| model | schedule | cuts | step predicted | measured | | peak of device 0, 1 predicted | measured | |")
    print("|---|---|---|---|---|---|---|---|---|")
    notes = []
    for model in SCHEDULED:
        source: tuple[str, ...] = (str(SAMPLES / f"{model}.py"),)
        if model not in CASES:
            source = (str(SAMPLES.parent / "benchmarks/real_models.py"), "--set", f"name={model}")
        _quietly("profile", *source)
        times = []
        for schedule in (*SCHEDULES, SEARCHED.name):
            _quietly("solve", "--devices", "2", "--mem", "8GB", "--micro-batches", "8", "--batch", "16",
                     "--schedule", schedule, "--recompute", "never")  # fmt: skip
            _quietly("emit", "--force")
            _train()
            plan, report = read_plan("plan.yaml"), read_run("run.json")
            times.append((plan.predicted.step_us, _measured_us(report)))
            cuts = ",".join(map(str, plan.balance))
            print(f"| {model} | {schedule} | {cuts} | {' | '.join(_cells(plan, report))} |", flush=True)
        notes.append(f"{model}: {_order(times)}")
    print("\n" + "\n".join(notes))


def _order(times: list[tuple[float, float]]) -> str:
    """Return a sentence on the error, and on pairs of schedules that were measured in another order than predicted."""
    error = statistics.median(abs(measured / predicted - 1) for predicted, measured in times)
    pairs = [(a, b) for a, b in combinations(times, 2) if abs(a[0] / b[0] - 1) > error]
    swapped = sum((a[0] < b[0]) != (a[1] < b[1]) for a, b in pairs)
    return (
        f"predictions are off by {error:.1%} in the median; of {len(pairs)} pairs of schedules whose predictions "
        f"differ by more, {swapped} were measured in the other order."
    )


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


def _measured_us(report: RunReport) -> float:
    return statistics.median(report.step_us[report.warmup_steps :])


def _difference(plan: Plan, report: RunReport) -> float:
    return _measured_us(report) / plan.predicted.step_us - 1


def _cells(plan: Plan, report: RunReport) -> Iterator[str]:
    yield from (f"{plan.predicted.step_us / 1e3:.1f} ms", f"{_measured_us(report) / 1e3:.1f} ms")
    yield f"{_difference(plan, report):+.1%}"
    predicted = plan.peak_bytes_by_device()
    measured = [report.stages[plan.chunks_of(device)[0].index].peak_bytes for device in range(plan.num_devices)]
    yield ", ".join(f"{size / 2**20:.2f}" for size in predicted) + " MiB"
    yield ", ".join(f"{size / 2**20:.2f}" for size in measured) + " MiB"
    yield ", ".join(f"{m / p - 1:+.1%}" for p, m in zip(predicted, measured, strict=True))


if __name__ == "__main__":
    main()
