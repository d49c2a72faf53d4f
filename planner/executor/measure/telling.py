"""What a run says at its end where it was not as planned."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.core.judge.drift import drift_of, drift_text
from planner.core.judge.verification import crowding
from planner.core.values.balance import Balance, Planned
from planner.core.values.printable import printable_lines
from planner.core.values.run_report import RunReport
from planner.device.machine import usable_cores


def drift_note(balance: Balance, report: RunReport, *, num_here: int, again: Callable[[Planned], Sequence[str]]) -> str:
    """What to say on stderr, with how to plan again; empty for a run that was as planned, or cannot be judged.

    Args:
        balance: What was run.
        report: What it took.
        num_here: How many of its devices are on this machine: on a CPU they share its cores.
        again: What to do, and the commands for it, a line each.
    """
    is_crowded = report.device.kind == "cpu" and crowding(num_here, balance.threads, usable_cores())
    drift = drift_of(balance, report, are_times_judged=not is_crowded)
    if not drift or balance.planned is None:
        return ""
    return printable_lines("\n    ".join([f"note: {drift_text(drift)}", *again(balance.planned)]))


def places_of(planned: Planned, folder: Path) -> tuple[str, str]:
    """Where plan and profile stand, as one names them where the script was started."""
    return os.path.relpath(folder / planned.plan), os.path.relpath(folder / planned.profile)
