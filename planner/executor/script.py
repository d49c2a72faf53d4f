"""Functions of every emitted `train.py`: command line, checkpoints, progress line, report, error message."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.core.errors import UsageError
from planner.core.judge.drift import deviating_figures, drift_text
from planner.core.judge.verification import core_shortage_reason
from planner.core.values.balance import Balance, RunPrediction, replan_command
from planner.core.values.devices import TORCH_KINDS
from planner.core.values.printable import printable_lines
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_speed, format_us, parse_us
from planner.device.machine import usable_cores
from planner.executor.checkpoints import Checkpoints
from planner.executor.measure.step_record import OnStep
from planner.executor.measure.trace import measured_trace_json
from planner.executor.pipeline import Pipeline
from planner.executor.watch.failure import FailureWatch, StoppedBySignal
from planner.files import check_outputs, check_writable, write, write_text


@dataclass(frozen=True, kw_only=True)
class ScriptArguments:
    """Command-line arguments of an emitted script."""

    steps: int
    seed: int
    report: str | None = None
    trace: str | None = None
    device: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 100
    keep: int = 3
    resume: str | None = None
    weights: str | None = None
    timeout_us: float = 300e6
    """Time after which a stage is reported as hanging."""
    check_nan: bool = False


def arguments(description: str | None, *, steps: int, seed: int) -> ScriptArguments:
    """Parse the command-line arguments of an emitted script.

    Args:
        description: Description for `--help`.
        steps: Default of `--steps`.
        seed: Default of `--seed`.

    Returns:
        Values of the options.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=int, default=steps, help=f"optimizer steps, including those before a resume (default {steps})")
    add("--seed", type=int, default=seed, help=f"seed of parameters, data and dropout (default {seed})")
    add("--report", metavar="run.json", help="write times and memory of the run to this file")
    add("--trace", metavar="trace.json", help="write the timeline of all ranks, for Perfetto")
    add("--device", choices=TORCH_KINDS, help="device to use instead of the planned one")
    add("--checkpoint", metavar="DIR", help="save checkpoints in this folder, also on SIGTERM")
    add("--checkpoint-every", type=int, default=100, metavar="N", help="steps between checkpoints (default 100)")
    add("--keep", type=int, default=3, metavar="N", help="number of newest checkpoints to keep (default 3)")
    add("--resume", metavar="auto|DIR", help="continue from this checkpoint; auto: the latest, if there is one")
    add("--weights", metavar="FILE", help="start from this state dict (.pt, .safetensors, or a checkpoint)")
    add(
        "--timeout",
        dest="timeout_us",
        type=_time,
        default=300e6,
        metavar="TIME",
        help="report a stage as hanging after this time (default 300s)",
    )
    add("--check-nan", action="store_true", help="check every output and gradient for NaN, not only the loss")
    options = vars(parser.parse_args())
    for name in ("steps", "checkpoint_every", "keep"):
        if options[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {options[name]}")
    return ScriptArguments(**options)


@contextmanager
def pipeline_script(
    balance_path: str | Path, options: ScriptArguments, *, on_step: OnStep | None = None
) -> Iterator[Pipeline]:
    """Provide the pipeline in a `with` block, and write the report after the block.

    A failure on any rank ends all processes with one error message and exit code 2. After SIGTERM, the exit code is
    143; after SIGINT, it is 130.

    Args:
        balance_path: Path of the balance configuration that `gpipe-plan emit` writes.
        options: Command-line arguments of the script.
        on_step: Function that is called with a `StepRecord` after every step, on rank 0 only.
    """
    check_outputs({"--report": options.report, "--trace": options.trace}, (str(balance_path),))
    pipeline: Pipeline | None = None
    with FailureWatch(options.timeout_us / 1e6) as watch:
        try:
            pipeline = Pipeline(
                balance_path,
                seed=options.seed,
                device=options.device,
                timeout_s=options.timeout_us / 1e6,
                check_nan=options.check_nan,
                watch=watch,
                on_step=on_step,
            )
            if pipeline.rank == 0:
                _check_outputs_writable(options)
            yield pipeline
            pipeline.end_loop()
            for done in pipeline.at_end:
                done()
            _finish(pipeline, options, Path(balance_path).parent)
        except BaseException as error:
            # If other ranks have failed, too, closing the pipeline might never end.
            if pipeline is not None and (isinstance(error, StoppedBySignal) or dist.get_world_size() == 1):
                pipeline.close()
            raise
        pipeline.close()


def checkpoints(
    pipeline: Pipeline, options: ScriptArguments, optimizer: torch.optim.Optimizer, **stateful: Any
) -> Checkpoints:
    """Return the writer of checkpoints. If the command line requests it, first resume a run or load weights.

    Args:
        pipeline: Pipeline of this rank.
        options: Command-line arguments of the script.
        optimizer: Optimizer of this rank's parameters.
        stateful: Additional objects to save and restore by name, such as a learning-rate schedule. Each has
            `state_dict` and `load_state_dict`.
    """
    return Checkpoints(
        pipeline,
        optimizer,
        folder=options.checkpoint,
        every=options.checkpoint_every,
        keep=options.keep,
        resume=options.resume,
        weights=options.weights,
        steps=options.steps,
        **stateful,
    )


def progress(pipeline: Pipeline, step: int, loss: float) -> None:
    """Print one line about a step, on the first rank.

    Args:
        pipeline: Pipeline of this rank.
        step: Index of the step.
        loss: Loss of the step.
    """
    if pipeline.rank == 0:
        took_us = pipeline.last_step_us
        speed = format_speed(pipeline.last_step_samples / took_us * 1e6)
        print(f"step {step}: loss {loss:.4f}, {format_us(took_us)}, {speed}", flush=True)


def peak_lines(balance: Balance, report: RunReport) -> Iterator[str]:
    """Yield one line per device, with the device's stages and its peak memory."""
    runs = {(run.replica, run.index): run for run in report.stages}
    for replica in sorted({run.replica for run in report.stages}):
        for stages in balance.by_device():
            indices = [str(stage) for stage in stages]
            name = f"stages {', '.join(indices[:-1])} and {indices[-1]}" if len(indices) > 1 else f"stage {indices[0]}"
            of_replica = f" of replica {replica}" if replica else ""
            yield f"{name}{of_replica}: peak memory {format_bytes(runs[replica, stages[0]].peak_bytes)}"


def _time(text: str) -> float:
    try:
        return parse_us(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _check_outputs_writable(options: ScriptArguments) -> None:
    for path in (options.report, options.trace):
        if path is not None:
            check_writable(path)


def _finish(pipeline: Pipeline, options: ScriptArguments, folder: Path) -> None:
    report = pipeline.report()
    if report is None:
        return
    for line in peak_lines(pipeline.balance, report):
        print(line, flush=True)
    if options.report:
        write(options.report, report)
        print(f"wrote {options.report}", flush=True)
    if options.trace:
        write_text(options.trace, measured_trace_json(pipeline.runs, f"{pipeline.balance.schedule}, measured"))
        print(f"wrote {options.trace}", flush=True)
    _print_drift(pipeline.balance, report, folder, options.report)


def _print_drift(balance: Balance, report: RunReport, folder: Path, report_path: str | None) -> None:
    """Print how the run differs from its plan, and the commands to replan. Ignore times if CPU cores are too few."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_crowded = report.device.kind == "cpu" and core_shortage_reason(num_here, balance.threads, usable_cores())
    drift = deviating_figures(balance, report, are_times_judged=not is_crowded)
    if drift and balance.planned is not None:
        lines = [f"note: {drift_text(drift)}", *_replan_commands(balance.planned, folder, report_path)]
        print(printable_lines("\n    ".join(lines)), file=sys.stderr, flush=True)


def _replan_commands(planned: RunPrediction, folder: Path, report: str | None) -> tuple[str, str, str]:
    # Paths in `planned` are relative to `folder`.
    plan, profile = (os.path.relpath(folder / path) for path in (planned.plan, planned.profile))
    how = "this run measured" if report else "a run measures, after `--report run.json`"
    named = [] if plan == "plan.yaml" else [shlex.quote(plan)]
    return (
        f"plan again with what {how}:",
        " ".join(["gpipe-plan verify", *named, f"--run {shlex.quote(report or 'run.json')}"]),
        replan_command(profile, planned.solve, calibration="calibration.yaml", plan=plan),
    )
