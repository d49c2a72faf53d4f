"""A run's stages as a table: what each took, what it waited for, and its memory."""

from operator import attrgetter

from planner.core.values.run_report import RunReport, StageRun
from planner.core.values.units import counted
from planner.show.views.numbers import layer_range
from planner.show.views.table import Table, column, table

__all__ = ["WAITING", "pipeline_words", "run_table"]

WAITING = ("recompute", "transfer", "idle")
"""Columns that some runs have nothing in."""


def pipeline_words(report: RunReport) -> str:
    """What the run ran on: its stages, and in how many pipelines side by side."""
    replicas = len({stage.replica for stage in report.stages})
    stages = counted(len(report.stages) // max(1, replicas), "stage")
    return f"{stages} in {replicas} replicas" if replicas > 1 else stages


def run_table(report: RunReport) -> Table:
    """A row per stage of every replica; times of one micro-batch, transfer and idle time of a whole step."""
    return table(
        report.stages,
        column("stage", "stage", _stage),
        column("layers", "layers", lambda run: layer_range(run.first, run.last)),
        column("forward", "forward", attrgetter("forward_us"), "us", per="micro-batch"),
        column("backward", "backward", attrgetter("backward_us"), "us", per="micro-batch"),
        column("recompute", "recomp.", attrgetter("recompute_us"), "us", per="micro-batch"),
        column("transfer", "transfer", attrgetter("transfer_us"), "us", per="step"),
        column("idle", "idle", attrgetter("idle_us"), "us", per="step"),
        column("parameters", "parameters", attrgetter("parameter_bytes"), "bytes"),
        column("peak", "peak\nmemory", attrgetter("peak_bytes"), "bytes"),
    )


def _stage(run: StageRun) -> str:
    return f"{run.index}, replica {run.replica}" if run.replica else str(run.index)
