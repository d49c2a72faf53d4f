"""Step time and peak memory of whole models that train on one GPU, predicted and measured.

    python benchmarks/gpu_runs.py > docs/measurements/gpu-runs.md
    python benchmarks/gpu_runs.py --device cpu --small

Each model is profiled on the device and planned for one device. The emitted script trains it with the bundled executor.
"""

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import planner
from planner.core.judge.calibration import allocator_peaks
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes
from planner.device.kinds import kind_of
from planner.files import read_run

ROOT = Path(__file__).resolve().parents[1]
MICRO_BATCHES = 4
STEPS = "14"


@dataclass(frozen=True)
class Subject:
    """Model to train, its micro-batch size, and its size in a trial run on a CPU."""

    path: str
    settings: dict[str, object]
    small: dict[str, object]
    micro_batch: int
    dtype: str | None = None
    recompute: tuple[str, ...] = ("never",)


LM = {"layers": 6, "width": 2048, "feed_forward": 8192, "heads": 32, "vocabulary": 32000, "tokens": 1024}
LM_SMALL = {"layers": 4, "width": 128, "feed_forward": 256, "heads": 4, "vocabulary": 256, "tokens": 64}
GPT2 = {"layers": 24, "width": 1024, "heads": 16, "tokens": 1024}
SUBJECTS = {
    "transformer_lm, bf16-mixed": Subject(
        "sample_models/transformer_lm.py", LM, LM_SMALL, 8, "bf16-mixed", ("never", "except-last", "always")
    ),
    "gpt2_medium, 64 tokens": Subject("benchmarks/gpt2.py", {**GPT2, "tokens": 64}, {"layers": 2, "tokens": 16}, 4),
    "resnet101": Subject("sample_models/resnet.py", {"depth": 101}, {"depth": 50, "image_size": 64}, 32),
    "amoebanet_d": Subject(
        "sample_models/amoebanet_d.py", {"num_layers": 18, "num_filters": 208}, {"num_layers": 3, "num_filters": 16}, 16
    ),
    "gpt2_medium, bf16-mixed": Subject("benchmarks/gpt2.py", GPT2, {"layers": 2, "tokens": 32}, 8, "bf16-mixed"),
    "transformer_lm": Subject("sample_models/transformer_lm.py", LM, LM_SMALL, 4),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(";"), default=None, help="names of models")
    parser.add_argument("--small", action="store_true", help="models for a CPU")
    options = parser.parse_args()
    kind = kind_of(torch.device(options.device))
    print("# Whole models on one GPU\n")
    print(
        f"`{shlex.join(['python', *sys.argv])}` on {kind.model_name}, torch {torch.__version__}, Python "
        f"{platform.python_version()}. An error is measured / predicted - 1.\n"
    )
    print(
        f"One stage, M = {MICRO_BATCHES}. The step is the median of the steps after the warm-up. Memory outside: "
        "what the profile reserves, and what the run took outside tensors, with the cache of torch's allocator.\n"
    )
    print("| model | b | recompute | predicted step | measured | error | predicted peak | measured | error | outside |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, subject in SUBJECTS.items():
        if options.only is None or name in options.only:
            _try(name, _trained(name, subject, options))


def _try(name: str, rows: Iterator[tuple[str, ...]]) -> None:
    try:
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)
    except Exception as error:  # the machine is lent for minutes: the other models still run
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _trained(name: str, subject: Subject, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    settings = subject.small if options.small else subject.settings
    size = 2 if options.small else subject.micro_batch
    with tempfile.TemporaryDirectory() as folder:
        profile = planner.profile(
            ROOT / subject.path,
            batch_sizes=(size,),
            device=options.device,
            dtype=subject.dtype,
            settings=settings,
            time_budget="3s",
            proof_budget="0s",  # the CPU tests it
            output=f"{folder}/profile.yaml",
        )
        for recompute in subject.recompute:
            plan = planner.solve(
                profile,
                devices=1,
                mem=profile.device.memory_bytes or "16GB",
                batch=size * MICRO_BATCHES,
                micro_batches=MICRO_BATCHES,
                schedule="gpipe",
                recompute=recompute,
            )
            planner.emit(plan, profile=profile, output=folder, force=True)
            run = _train(Path(folder))
            step_us = statistics.median(run.step_us[run.warmup_steps :])
            (peak_bytes,), stage = allocator_peaks(plan), run.stages[0]
            yield (
                name,
                str(size),
                recompute,
                f"{plan.predicted.step_us / 1e3:.1f} ms",
                f"{step_us / 1e3:.1f} ms",
                f"{step_us / plan.predicted.step_us - 1:+.1%}",
                format_bytes(peak_bytes),
                format_bytes(stage.peak_bytes),
                f"{stage.peak_bytes / peak_bytes - 1:+.2%}",
                f"{format_bytes(plan.stages[0].memory.reserve)}, {format_bytes(stage.outside_bytes)}",
            )


def _train(folder: Path) -> RunReport:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ}
    command = [*launch, "train.py", "--steps", STEPS, "--report", "run.json"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return read_run(str(folder / "run.json"))


if __name__ == "__main__":
    main()
