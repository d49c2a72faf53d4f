"""A run's stages as a table: what each took, what it waited for, and its memory."""

from collections.abc import Callable
from operator import attrgetter

from planner.core.values.run_report import RunReport, StageRun
from planner.core.values.units import counted
from planner.show.views.numbers import layer_range
from planner.show.views.table import Column, Table, Unit, Value

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

    def column(
        name: str, value: Callable[[StageRun], Value], unit: Unit, *, title: str = "", per: str = "micro-batch"
    ) -> Column:
        per = per if unit == "us" else ""
        return Column(name=name, title=title or name, unit=unit, per=per, values=tuple(map(value, report.stages)))

    return Table(
        columns=(
            column("stage", _stage, "text"),
            column("layers", lambda run: layer_range(run.first, run.last), "text"),
            column("forward", attrgetter("forward_us"), "us"),
            column("backward", attrgetter("backward_us"), "us"),
            column("recompute", attrgetter("recompute_us"), "us", title="recomp."),
            column("transfer", attrgetter("transfer_us"), "us", per="step"),
            column("idle", attrgetter("idle_us"), "us", per="step"),
            column("parameters", attrgetter("parameter_bytes"), "bytes"),
            column("peak", attrgetter("peak_bytes"), "bytes", title="peak\nmemory"),
        )
    )


def _stage(run: StageRun) -> str:
    return f"{run.index}, replica {run.replica}" if run.replica else str(run.index)
