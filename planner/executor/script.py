"""What every emitted `train.py` shares: command line, progress line, report, and errors without tracebacks."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.core.errors import ExitCode, PlannerError
from planner.core.units import format_bytes, format_speed, format_us
from planner.executor.pipeline import OneRankError, Pipeline
from planner.executor.trace import trace_json
from planner.files import write, write_text

__all__ = ["Arguments", "arguments", "pipeline_script", "progress"]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of an emitted script."""

    steps: int
    seed: int
    report: str | None
    device: str | None
    trace: str | None = None


def arguments(description: str | None, *, steps: int, seed: int) -> Arguments:
    """Parses the command line; the defaults are the script's own knobs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps (default {steps})")
    parser.add_argument("--seed", type=int, default=seed, help=f"of parameters, data and dropout (default {seed})")
    parser.add_argument("--report", metavar="run.json", help="write what the run took to this file")
    parser.add_argument("--trace", metavar="trace.json", help="write what every rank did, for Perfetto")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the device planned for")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, got {given.steps}")
    return Arguments(**vars(given))


@contextmanager
def pipeline_script(balance_path: str | Path, given: Arguments) -> Iterator[Pipeline]:
    """The pipeline for the block; then the report. Errors of ours end the process with one message and exit code 2."""
    pipeline: Pipeline | None = None
    try:
        pipeline = Pipeline(balance_path, seed=given.seed, device=given.device)
        yield pipeline
        report = pipeline.report()
        if report is not None:
            for stage in report.stages:
                replica = f" of replica {stage.replica}" if stage.replica else ""
                print(f"stage {stage.index}{replica}: peak memory {format_bytes(stage.peak_bytes)}", flush=True)
            if given.report:
                write(given.report, report)
                print(f"wrote {given.report}", flush=True)
            if given.trace:
                write_text(given.trace, trace_json(pipeline.runs, f"{pipeline.balance.schedule}, measured"))
                print(f"wrote {given.trace}", flush=True)
    except PlannerError as error:
        # Nearly always every rank finds the same mistake: one message is enough.
        if isinstance(error, OneRankError) or int(os.environ.get("RANK", "0")) == 0:
            hint = f"\n\nhint: {error.hint}" if error.hint else ""
            print(f"error: {error}{hint}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.ERROR)
    finally:
        if pipeline is not None:
            pipeline.close()


def progress(pipeline: Pipeline, step: int, loss: float | None) -> None:
    """One line per step, on the first rank."""
    if pipeline.rank == 0:
        took_us = pipeline.last_step_us
        speed = format_speed(pipeline.balance.batch / took_us * 1e6)
        print(f"step {step}: loss {loss:.4f}, {format_us(took_us)}, {speed}", flush=True)
