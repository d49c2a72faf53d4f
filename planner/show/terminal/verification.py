"""Predicted beside measured, with a verdict on every figure that is judged."""

from collections.abc import Callable, Sequence

from rich.text import Text

from planner.core.judge.verification import Compared, Verification
from planner.core.values.units import format_bytes, format_rate, format_us
from planner.show.terminal.rendering import BLANK, Column, flow, render, table
from planner.show.terminal.style import Style
from planner.show.views.measured import HEADERS, label_of
from planner.show.views.numbers import NOTHING, difference, percent

__all__ = ["verification_text"]


def verification_text(verification: Verification, style: Style) -> str:
    """The table, the notes, what was calibrated, and the answer."""
    rows: list[Sequence[str | Text] | None] = []
    for before, row in zip((None, *verification.compared), verification.compared, strict=False):
        if before is not None and before.what != row.what and "step_us" not in (before.what, row.what):
            rows.append(None)
        rows.append(_row(row))
    columns = [Column(header="", number=False), *(Column(header=name) for name in HEADERS), Column(header="")]
    shown = table(columns, rows, style)
    said = [*verification.notes, *([] if verification.proof is None else [str(verification.proof)])]
    notes = [flow(note.split(), style, gap=" ") for note in said]
    return render(style, shown, *notes, BLANK, _calibrated(verification, style), _answer(verification, style))


_TEXTS: dict[str, Callable[[float], str]] = {"bubble": percent, "peak_bytes": format_bytes}


def _row(row: Compared) -> Sequence[str | Text]:
    text = _TEXTS.get(row.what, format_us)
    # A bubble is a share itself: a difference of shares in percent would be read as one of points.
    off = NOTHING if row.what == "bubble" or not row.measured else difference(row.predicted, row.measured)
    said = {None: Text(""), True: Text("ok", style="green"), False: Text("! OFF", style="bold red")}[row.agrees]
    return [label_of(row, "device"), text(row.predicted), text(row.measured) if row.measured else NOTHING, off, said]


def _calibrated(verification: Verification, style: Style) -> Text:
    calibration = verification.calibration
    facts = [f"compute x {calibration.compute:.3g}", f"executor {format_us(calibration.overhead_us)}"]
    if calibration.link is not None:
        rate = f"{format_rate(calibration.link.bytes_per_s)}, " if calibration.link.bytes_per_s else ""
        facts.append(f"link {rate}{format_us(calibration.link.latency_us)}")
    facts.append(f"reserve {format_bytes(calibration.reserve_bytes)}")
    return flow(["calibrated:", *(f"{fact};" for fact in facts[:-1]), facts[-1]], style, gap=" ")


def _answer(verification: Verification, style: Style) -> Text:
    allowed = verification.tolerance
    said = [
        f"(step within {percent(allowed.step, decimals=0)},",
        f"memory predicted at most {percent(allowed.memory_below, decimals=0)} too low,",
        f"{percent(allowed.memory_above, decimals=0)} too high,",
        f"or {format_bytes(allowed.memory_slack_bytes)} off)",
    ]
    words = ("as predicted", "bold green") if verification.agrees else ("not as predicted", "bold red")
    return flow([Text(words[0], style=words[1]), *said], style, gap=" ")
