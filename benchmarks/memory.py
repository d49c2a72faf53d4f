"""Predicted and measured peak memory own: three stages, M = 1, 2, 4, each recomputation and precision.

    python benchmarks/memory.py > docs/measurements/memory.md
    python benchmarks/memory.py --kinds >> docs/measurements/memory.md
    python benchmarks/memory.py --kinds --model lstm
    python benchmarks/memory.py --halves > docs/measurements/memory-halves.md
    python benchmarks/memory.py path/to/model.py …

`--kinds` measures other models, of kinds whose memory is hard to predict, in micro-batches of 8. `--halves` measures
schedules with split backwards.

Each model is profiled, planned and emitted as a user would do it, but without the equivalence check unless `--check` is
given: then cuts that it finds wrong are removed. Three processes run two steps of every plan, one after the other, and
report the peak of the second step (the optimizer's state exists by then). Memory does not depend on how busy the
machine is. To measure other models, give their files, or add them to `MODELS` or `KINDS`.
"""

import argparse
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
from planner.core.judge.verification import Tolerance
from planner.core.schedule import SCHEDULES
from planner.device.machine import cpu_name
from planner.executor import Pipeline
from planner.files import read_plan, read_profile


@dataclass(frozen=True)
class Subject:
    """A model to measure."""

    name: str
    path: Path
    settings: tuple[str, ...] = ()
    """As after `--set`."""
    optimizer: str = ""
    """Another than the file's."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measurements of a group of models."""

    title: str
    subjects: tuple[Subject, ...]
    micro_batch_size: int
    micro_batches: tuple[int, ...]
    recompute: tuple[str, ...]
    schedules: tuple[str, ...]
    dtypes: tuple[str, ...]
    num_devices: int = 3
    """Fewer where there are fewer layers. Schedules in which a device runs several stages run two on each."""


SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
MODELS = (
    Subject("transformer_lm", SAMPLES / "transformer_lm.py"),
    Subject("amoebanet_d", SAMPLES / "amoebanet_d.py"),
    Subject("resnet", SAMPLES / "resnet.py"),
    Subject("unet", SAMPLES / "unet.py"),
    Subject("mlp", SAMPLES / "mlp.py"),
    *(
        Subject(name, Path(__file__).resolve().parent / "real_models.py", (f"name={name}",))
        for name in ("gpt2", "llama", "bert", "albert", "t5", "vit", "convnext")
    ),
    Subject(
        "vit, 3 of 6 blocks frozen",
        Path(__file__).resolve().parent / "real_models.py",
        ("name=vit", "frozen=3"),
    ),
)
KINDS = (
    *(
        Subject(name, Path(__file__).resolve().parent / "memory_kinds.py", (f"name={name}",))
        for name in (
            *("lstm", "gru", "gpt2-lora", "densenet121", "efficientnet_b0", "mixtral", "moe-aux-loss", "moe-routed"),
            *("fcos", "detr", "two-towers", "siamese", "top-residual", "spectral-norm", "tiny-mlp", "mamba"),
            *("pruned", "repeated", "penalty", "nllb-moe", "jetmoe", "detector", "canine", "zamba2"),
            *("paligemma", "vq-vae", "vits"),
        )
    ),
)
USUAL = Table(
    title="# Predicted and measured peak memory",
    subjects=MODELS,
    micro_batch_size=2,
    micro_batches=(1, 2, 4),
    recompute=("never", "except-last", "always"),
    schedules=("gpipe",),
    dtypes=("fp32", "bf16-mixed"),
)
HARD = Table(
    title="\n## Kinds of models whose memory is hard to predict",
    subjects=KINDS,
    micro_batch_size=8,
    micro_batches=(2, 4),
    recompute=("never", "always"),
    schedules=("gpipe", "1f1b"),
    dtypes=("fp32",),
)
SPLIT_BACKWARD = Table(
    title="# Predicted and measured peak memory with split backward",
    subjects=tuple(subject for subject in MODELS if subject.name in {"transformer_lm", "resnet", "mlp", "gpt2"}),
    micro_batch_size=4,
    micro_batches=(4, 8),
    recompute=("never", "always"),
    schedules=tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward),
    dtypes=("fp32", "bf16-mixed"),
    num_devices=2,
)
PROMISED = Tolerance(step=1.0, memory_below=0.01, memory_above=0.05)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One device of one plan."""

    model: str
    dtype: str
    schedule: str
    recompute: str
    micro_batches: int
    device: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_kept(self) -> bool:
        """True if the error is within the promise."""
        return PROMISED.allows_peak(predicted=self.predicted_bytes, measured=self.measured_bytes)


def main() -> None:
    """Measure all models, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="MODEL.py", help="measure these instead")
    parser.add_argument("--kinds", action="store_true", help="kinds whose memory is hard to predict")
    parser.add_argument("--halves", action="store_true", help="schedules with split backwards")
    parser.add_argument("--model", action="append", metavar="NAME", help="only this one of the table")
    parser.add_argument("--check", action="store_true", help="remove cuts that the equivalence check finds wrong")
    options = parser.parse_args()
    table = HARD if options.kinds else SPLIT_BACKWARD if options.halves else USUAL
    subjects = tuple(Subject(Path(name).stem, Path(name).resolve()) for name in options.files) or table.subjects
    unknown = set(options.model or ()).difference(subject.name for subject in subjects)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in subjects)}")
    chosen = [subject for subject in subjects if not options.model or subject.name in options.model]
    _measure(table, chosen, proof_budget="600s" if options.check else "0s")


def _measure(table: Table, subjects: Sequence[Subject], proof_budget: str) -> None:
    _print_head(table)
    rows: list[Row] = []
    missing: list[str] = []
    for number, (subject, dtype) in enumerate(product(subjects, table.dtypes), 1):
        count = len(subjects) * len(table.dtypes)
        print(f"{number} of {count}: {subject.name} {dtype}", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                measured = list(_measured(table, subject, dtype, Path(folder), proof_budget))
        except _NotMeasuredError:
            missing.append(f"{subject.name} {dtype}")
            continue
        rows += measured
        _print_summaries(measured)
    print()
    if missing:
        print(f"Not measured, because they could not be profiled or run: {', '.join(missing)}.\n")
    if rows:
        _print_outside(rows)


class _NotMeasuredError(Exception):
    """A model could not be measured; the reason is on stderr."""


def _measured(table: Table, subject: Subject, dtype: str, folder: Path, proof_budget: str) -> Iterator[Row]:
    profile = str(folder / "profile.yaml")
    options = [word for setting in subject.settings for word in ("--set", setting)]
    options += ["--optimizer", subject.optimizer] if subject.optimizer else []
    sizes = ("--batch-sizes", str(table.micro_batch_size), "--repeat", "2")
    budgets = ("--time-budget", "0s", "--proof-budget", proof_budget)
    _quietly("profile", str(subject.path), "-o", profile, "--dtype", dtype, *sizes, *budgets, *options)
    num_layers = len(read_profile(profile).layers)
    num_devices = min(table.num_devices, num_layers)
    plans = []
    for schedule, recompute, count in product(table.schedules, table.recompute, table.micro_batches):
        if schedule == "1f1b" and count < num_devices:
            continue  # it needs as many
        chunks = 2 if SCHEDULES[schedule].is_chunked else 1
        cuts = [k * num_layers // (chunks * num_devices) for k in range(chunks * num_devices + 1)]
        balance = ",".join(str(end - first) for first, end in pairwise(cuts))
        place = folder / str(len(plans))
        plan = str(place / "plan.yaml")
        _quietly("solve", profile, "-o", plan, "--devices", str(num_devices), "--mem", "1TB", "--balance", balance,
                 "--micro-batches", str(count), "--batch", str(table.micro_batch_size * count),
                 "--schedule", schedule, "--recompute", recompute, "--chunks", str(chunks))  # fmt: skip
        _quietly("emit", plan, "-o", str(place))
        plans.append((schedule, recompute, read_plan(plan)))
    for n, peaks in enumerate(_run_all(folder, len(plans), num_devices)):
        schedule, recompute, made = plans[n]
        for device, predicted in enumerate(made.peak_bytes_by_device()):
            yield Row(
                model=subject.name,
                dtype=dtype,
                schedule=schedule,
                recompute=recompute,
                micro_batches=made.micro_batches,
                device=device,
                predicted_bytes=predicted,
                measured_bytes=peaks[made.chunks_of(device)[0].index],
            )


def _run_all(folder: Path, count: int, num_devices: int) -> list[list[int]]:
    """Return the peaks of every stage, for each of the plans in the folders 0..count - 1."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_devices)]
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
    """Run one of the processes."""
    dist.init_process_group("gloo")
    peaks = [_peaks_of(f"{n}/balance.yaml") for n in range(int(os.environ[_WORKER]))]
    if dist.get_rank() == 0:
        Path("peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def _peaks_of(balance: str) -> list[int]:
    """Return the peaks of every stage on rank 0, and nothing on other ranks."""
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


def _print_head(table: Table) -> None:
    print(f"{table.title}\n")
    print(f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}.")
    print(
        f"The emitted pipeline ran on {table.num_devices} processes (schedules: {', '.join(table.schedules)}), with\n"
        "equally many layers per stage, or fewer stages if the model has fewer layers. Micro-batches have "
        f"{table.micro_batch_size}\n"
        f"samples; M is {', '.join(map(str, table.micro_batches))}, if the schedule allows it.\n"
        "An error is (predicted - measured) / measured, for each device, positive if the prediction is too high.\n"
        "README and cost model state measured / predicted - 1, which has the opposite sign. The measured peak is the\n"
        f"allocator's in the second step. Errors of {-PROMISED.memory_below:+.0%} to {PROMISED.memory_above:+.0%},\n"
        f"plus at most {PROMISED.memory_slack_bytes >> 10} KiB in both directions, are within tolerance.\n"
    )
    print("| model | precision | schedule | recompute | rows | peaks | lowest | highest | median | outside |")
    print("|---|---|---|---|---|---|---|---|---|---|")


def _print_summaries(rows: Sequence[Row]) -> None:
    for schedule, recompute in dict.fromkeys((row.schedule, row.recompute) for row in rows):
        some = [row for row in rows if (row.schedule, row.recompute) == (schedule, recompute)]
        errors = [row.error for row in some]
        peaks = [row.measured_bytes for row in some]
        cells = [
            some[0].model,
            some[0].dtype,
            schedule,
            recompute,
            str(len(some)),
            f"{_mib(min(peaks))} to {_mib(max(peaks))}",
            *(f"{error:+.2%}" for error in (min(errors), max(errors), statistics.median(errors))),
            str(sum(not row.is_kept for row in some)),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _print_outside(rows: Sequence[Row]) -> None:
    errors = [row.error for row in rows]
    outside = [row for row in rows if not row.is_kept]
    print(f"All {len(rows)} rows: {min(errors):+.2%} to {max(errors):+.2%}, ", end="")
    print(f"median absolute error {statistics.median(map(abs, errors)):.2%}; {len(outside)} outside tolerance.")
    if outside:
        columns: dict[str, Callable[[Row], str]] = {
            **{
                name: lambda row, name=name: str(asdict(row)[name])
                for name in ("model", "dtype", "schedule", "recompute", "device")
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
