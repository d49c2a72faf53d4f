"""Predicted peak memory beside the allocator's own: three stages, M = 1, 2, 4, each recomputation and precision.

    python benchmarks/memory.py > docs/measurements/memory.md
    python benchmarks/memory.py path/to/model.py …

Each model is profiled, planned and emitted as a user would do it; then three processes run two steps of every plan,
one after the other, and report the peak of the second step (the optimizer's state exists by then). Memory does not
depend on how busy the machine is. To measure other models, give their files, or add them to `MODELS`.
"""

import contextlib
import gc
import io
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path

import torch
import torch.distributed as dist

from planner.cli.main import run
from planner.executor import Pipeline
from planner.files import read_plan, read_profile
from planner.model.machine import cpu_name


@dataclass(frozen=True)
class Subject:
    """A model to measure."""

    name: str
    path: Path
    settings: tuple[str, ...] = ()
    """As after `--set`."""


SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
MODELS = [
    Subject("transformer_lm", SAMPLES / "transformer_lm.py"),
    Subject("amoebanet_d", SAMPLES / "amoebanet_d.py"),
    Subject("resnet", SAMPLES / "resnet.py"),
    Subject("unet", SAMPLES / "unet.py"),
    Subject("mlp", SAMPLES / "mlp.py"),
    *(
        Subject(name, Path(__file__).resolve().parent / "real_models.py", (f"name={name}",))
        for name in ("gpt2", "llama", "bert", "t5", "vit", "convnext")
    ),
    Subject(
        "vit, 3 of 6 blocks frozen",
        Path(__file__).resolve().parent / "real_models.py",
        ("name=vit", "frozen=3"),
    ),
]
NUM_STAGES = 3
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = (1, 2, 4)
RECOMPUTE = ("never", "except-last", "always")
DTYPES = ("fp32", "bf16-mixed")
LOW, HIGH = -0.01, 0.05
"""What is promised, relative to the truth."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage of one plan."""

    model: str
    dtype: str
    recompute: str
    micro_batches: int
    stage: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the prediction, relative to the truth."""
        return self.predicted_bytes / self.measured_bytes - 1


def main() -> None:
    """Measures all models, and prints the tables."""
    subjects = [Subject(Path(name).stem, Path(name).resolve()) for name in sys.argv[1:]] or MODELS
    _print_head()
    rows: list[Row] = []
    missing: list[str] = []
    for subject, dtype in product(subjects, DTYPES):
        print(f"{subject.name} {dtype}", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = list(_measured(subject, dtype, Path(folder)))
        except _NotMeasuredError:
            missing.append(f"{subject.name} {dtype}")
            continue
        rows += found
        _print_summaries(found)
    print()
    if missing:
        print(f"Not measured, because they could not be profiled or run: {', '.join(missing)}.\n")
    if rows:
        _print_outside(rows)


class _NotMeasuredError(Exception):
    """The reason has been told on stderr."""


def _measured(subject: Subject, dtype: str, folder: Path) -> Iterator[Row]:
    profile = str(folder / "profile.yaml")
    settings = [word for setting in subject.settings for word in ("--set", setting)]
    sizes = ("--batch-sizes", str(MICRO_BATCH_SIZE), "--repeat", "2")
    _quietly("profile", str(subject.path), "-o", profile, "--dtype", dtype, *sizes, *settings)
    num_layers = len(read_profile(profile).layers)
    cuts = [k * num_layers // NUM_STAGES for k in range(NUM_STAGES + 1)]
    balance = ",".join(str(end - first) for first, end in pairwise(cuts))
    plans = []
    for n, (recompute, micro_batches) in enumerate(product(RECOMPUTE, MICRO_BATCHES)):
        place = folder / str(n)
        plan = str(place / "plan.yaml")
        _quietly("solve", profile, "-o", plan, "--devices", str(NUM_STAGES), "--mem", "1TB", "--balance", balance,
                 "--micro-batches", str(micro_batches), "--batch", str(MICRO_BATCH_SIZE * micro_batches),
                 "--recompute", recompute)  # fmt: skip
        _quietly("emit", plan, "-o", str(place))
        plans.append((recompute, read_plan(plan)))
    for n, peaks in enumerate(_run_all(folder, len(plans))):
        recompute, made = plans[n]
        for stage, peak in zip(made.stages, peaks, strict=True):
            yield Row(
                model=subject.name,
                dtype=dtype,
                recompute=recompute,
                micro_batches=made.micro_batches,
                stage=stage.index,
                predicted_bytes=stage.memory.total,
                measured_bytes=peak,
            )


def _run_all(folder: Path, count: int) -> list[list[int]]:
    """Peaks of every stage, for each of the plans in the folders 0..count - 1."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_STAGES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _WORKER: str(count)}
    done = subprocess.run(
        [*command, __file__], cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise _NotMeasuredError
    peaks: list[list[int]] = json.loads((folder / "peaks.json").read_text())
    return peaks


_WORKER = "GPIPE_PLAN_MEMORY_CASES"


def _work() -> None:
    """What one of the processes does."""
    dist.init_process_group("gloo")
    peaks = [_peaks_of(f"{n}/balance.yaml") for n in range(int(os.environ[_WORKER]))]
    if dist.get_rank() == 0:
        Path("peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def _peaks_of(balance: str) -> list[int]:
    """Of every stage, on rank 0; else empty."""
    # What is left of the run before must go now: the recorder would count it as released by this one.
    gc.collect()
    pipeline = Pipeline(balance)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    for inputs, targets in pipeline.batches(2):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
    report = pipeline.report()
    pipeline.close()
    return [stage.peak_bytes for stage in report.stages] if report is not None else []


def _quietly(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = run([*arguments, "--quiet"])
    if code != 0:
        raise _NotMeasuredError


def _print_head() -> None:
    print("# Predicted peak memory beside the allocator's\n")
    print(f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}.")
    print(
        f"Every stage of {NUM_STAGES} (GPipe, as many layers each), micro-batches of {MICRO_BATCH_SIZE} samples, ",
        end="",
    )
    print(f"M = {', '.join(map(str, MICRO_BATCHES))}:")
    print(
        "three processes run the emitted pipeline. Errors of the prediction are relative to what the allocator counted "
    )
    print(f"in the second step; promised are {LOW:+.0%} to {HIGH:+.0%}.\n")
    print("| model | precision | recompute | rows | peaks | lowest | highest | median |")
    print("|---|---|---|---|---|---|---|---|")


def _print_summaries(rows: Sequence[Row]) -> None:
    for recompute in RECOMPUTE:
        some = [row for row in rows if row.recompute == recompute]
        errors = [row.error for row in some]
        peaks = [row.measured_bytes for row in some]
        size = f"{_mib(min(peaks))} to {_mib(max(peaks))}"
        error = f"{min(errors):+.2%} | {max(errors):+.2%} | {statistics.median(errors):+.2%}"
        print(f"| {some[0].model} | {some[0].dtype} | {recompute} | {len(some)} | {size} | {error} |", flush=True)


def _print_outside(rows: Sequence[Row]) -> None:
    errors = [row.error for row in rows]
    outside = [row for row in rows if not LOW <= row.error <= HIGH]
    print(f"All {len(rows)} rows: {min(errors):+.2%} to {max(errors):+.2%}, ", end="")
    print(f"median of their sizes {statistics.median(map(abs, errors)):.2%}; {len(outside)} outside what is promised.")
    if outside:
        columns: dict[str, Callable[[Row], str]] = {
            **{
                name: lambda row, name=name: str(asdict(row)[name]) for name in ("model", "dtype", "recompute", "stage")
            },
            "M": lambda row: str(row.micro_batches),
            "predicted": lambda row: _mib(row.predicted_bytes),
            "measured": lambda row: _mib(row.measured_bytes),
            "error": lambda row: f"{row.error:+.2%}",
        }
        print(f"\n| {' | '.join(columns)} |")
        print("|---" * len(columns) + "|")
        for row in outside:
            print(f"| {' | '.join(cell(row) for cell in columns.values())} |")


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    _work() if _WORKER in os.environ else main()
