"""Note at the end of a run whose time or memory differs from the plan."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.core.judge.drift import deviating_figures, drift_text
from planner.core.judge.verification import core_shortage_reason
from planner.core.values.balance import Balance, RunPrediction
from planner.core.values.printable import printable_lines
from planner.core.values.run_report import RunReport
from planner.device.machine import usable_cores


def drift_note(
    balance: Balance, report: RunReport, *, num_here: int, advice: Callable[[RunPrediction], Sequence[str]]
) -> str:
    """Return a note about differences between a run and its plan.

    The note is empty if there are no differences, or if they cannot be judged.

    Args:
        balance: Balance configuration of the run.
        report: Measurements of the run.
        num_here: Number of the run's processes on this machine, which share its cores.
        advice: Function that returns advice and the commands to replan, one per line.
    """
    is_crowded = report.device.kind == "cpu" and core_shortage_reason(num_here, balance.threads, usable_cores())
    drift = deviating_figures(balance, report, are_times_judged=not is_crowded)
    if not drift or balance.planned is None:
        return ""
    return printable_lines("\n    ".join([f"note: {drift_text(drift)}", *advice(balance.planned)]))


def paths_of_plan_and_profile(planned: RunPrediction, folder: Path) -> tuple[str, str]:
    """Return the paths of the plan and the profile, relative to the working directory of the script.

    In `planned`, these paths are relative to `folder`.
    """
    return os.path.relpath(folder / planned.plan), os.path.relpath(folder / planned.profile)
