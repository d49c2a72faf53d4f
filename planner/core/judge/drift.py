"""Deviation of a run from its plan, and the message that the run prints at its end."""

from collections.abc import Sequence
from statistics import median
from typing import Final

from planner.core.judge.calibration import timed_steps_us
from planner.core.judge.verification import (
    DEFAULT_TOLERANCE,
    ComparedFigure,
    compared_peaks,
    disturbance_reason,
    samples_per_step_if_unplanned,
    with_agreement,
)
from planner.core.values.balance import Balance
from planner.core.values.run_report import RunReport
from planner.core.values.units import format_bytes, format_us, pluralize

ENOUGH_STEPS: Final = 10
"""Smallest number of steps after the warm-up for a comparison; `verify` measures this number of steps."""


def deviating_figures(balance: Balance, report: RunReport, *, are_times_judged: bool) -> tuple[ComparedFigure, ...]:
    """Return the step time and device peaks that deviate from the plan by more than `verify` allows by default.

    Nothing is compared if the run is too short, on another kind of device, or with other mini-batches than planned.

    Args:
        balance: Stages that were run, with their predicted values.
        report: Report of the run.
        are_times_judged: False if the times are known to be disturbed by other processes.
    """
    planned, steps_us = balance.planned, timed_steps_us(report)
    is_long = len(report.step_us) - report.warmup_steps >= ENOUGH_STEPS
    if planned is None or not is_long or samples_per_step_if_unplanned(report) is not None:
        return ()
    if report.device.kind != (planned.device or balance.device):
        return ()
    step = ComparedFigure(what="step_us", predicted=planned.step_us, measured=median(steps_us))
    peaks = compared_peaks(list(zip(balance.by_device(), balance.peak_bytes, strict=True)), report)
    # A profile written by hand may have no times.
    are_times_judged = are_times_judged and planned.step_us > 0 and not disturbance_reason(report)
    rows = (with_agreement(row, DEFAULT_TOLERANCE, are_times_judged=are_times_judged) for row in (step, *peaks))
    return tuple(row for row in rows if row.agrees is False)


def drift_text(drift: Sequence[ComparedFigure]) -> str:
    """Return a sentence about the deviating step time, and about the device peak that deviates most."""
    said, tolerance = [], DEFAULT_TOLERANCE
    for row in drift:
        if row.what == "step_us":
            took, planned = format_us(row.measured), format_us(row.predicted)
            said.append(f"a step took {took}, planned {planned} ({_off(row)}, {tolerance.step:.0%} are allowed)")
    peaks = sorted((row for row in drift if row.what == "peak_bytes"), key=lambda row: abs(_share(row)), reverse=True)
    if peaks:
        worst, further = peaks[0], len(peaks) - 1
        allowed = f"-{tolerance.memory_above:.0%} to +{tolerance.memory_below:.0%} are allowed"
        said.append(
            f"the peak of device {worst.index} was {format_bytes(worst.measured)}, planned "
            f"{format_bytes(worst.predicted)} ({_off(worst)}, {allowed})"
            + (f", and {pluralize(further, 'other')} {'deviates' if further == 1 else 'deviate'}" if further else "")
        )
    return f"not as planned: {'; '.join(said)}"


def _off(row: ComparedFigure) -> str:
    return f"{_share(row):+.1%}"


def _share(row: ComparedFigure) -> float:
    return row.measured / row.predicted - 1 if row.predicted else 0.0
