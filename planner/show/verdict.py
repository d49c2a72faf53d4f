"""The verdict on a plan: its findings, the memory of its devices, and whether it fits."""

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.core.verdict import Finding, Verdict
from planner.show.memory import memory_parts
from planner.show.rendering import BLANK, plain, render
from planner.show.style import Style

__all__ = ["verdict_text"]

_COLORS = {"error": "bold red", "warning": "bold yellow"}


def verdict_text(verdict: Verdict, style: Style) -> str:
    """Every finding with its code and hint, the memory of the plan as recomputed, and the answer on the last line."""
    parts: list[RenderableType] = []
    for finding in verdict.findings:
        parts += [*_finding(finding, style), BLANK]
    if verdict.plan is not None:
        plan = verdict.plan
        parts += [*memory_parts(plan.stages, style, num_devices=plan.num_devices), BLANK]
    return render(style, *parts, _answer(verdict))


def _finding(finding: Finding, style: Style) -> list[RenderableType]:
    code = Text(f"{finding.code} {finding.severity}:", style=_COLORS[finding.severity])
    parts: list[RenderableType] = [Text.assemble(code, f" {plain(finding.message, style)}")]
    if finding.hint:
        parts.append(Padding(Text(f"hint: {plain(finding.hint, style)}"), (0, 0, 0, 6), expand=False))
    return parts


def _answer(verdict: Verdict) -> Text:
    errors = sum(finding.severity == "error" for finding in verdict.findings)
    warnings = len(verdict.findings) - errors
    counts = ", ".join(f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((errors, "error"), (warnings, "warning")) if n)
    if verdict.fits:
        return Text.assemble(("fits", "bold green"), f" ({counts})" if counts else "")
    # Without a recomputed plan nothing was weighed: the plan belongs to another profile.
    words = "does not fit" if any(f.code == "GP101" for f in verdict.findings) else "does not fit this profile"
    return Text.assemble((words, "bold red"), f" ({counts})")
