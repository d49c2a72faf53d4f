"""Verdicts as text: findings, memory of the devices, and result; and explanations of rules."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding, Rule
from planner.core.values.findings import rule_of_code as rule_of
from planner.core.values.printable import printable
from planner.core.values.units import pluralize
from planner.show.terminal.memory import memory_renderables
from planner.show.terminal.rendering import BLANK, heading, render
from planner.show.terminal.style import Style

_COLOR_OF_ANSWER = {"fits": "bold green", "tight": "bold yellow"}

_COLORS = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def verdict_text(verdict: Verdict, style: Style) -> str:
    """Return a verdict as text: findings with hints, changes that would make the plan fit, and memory per device."""
    parts: list[RenderableType] = []
    for finding in verdict.findings:
        parts += [*_finding(finding), BLANK]
    if verdict.would_fit:
        lines = [Text("what would fit:"), *(Text(f"      {printable(line)}") for line in verdict.would_fit)]
        parts += [*lines, BLANK]
    if verdict.difference is not None:
        from planner.show.terminal.plans import difference_parts  # noqa: PLC0415 - tables, which few verdicts have

        parts += [*difference_parts(verdict.difference, style), BLANK]
    if verdict.plan is not None:
        parts += [*memory_renderables(verdict.plan.by_device(), style, gpus=verdict.plan.tensor_parallel), BLANK]
    return render(style, *parts, _answer(verdict))


def _finding(finding: Finding) -> Iterator[RenderableType]:
    code = Text(f"{finding.code} {finding.severity}:", style=_COLORS[finding.severity])
    yield Text.assemble(code, f" {printable(finding.message)}")
    if finding.hint:
        yield _indented(f"hint: {finding.hint}", 6)


def verdict_words(verdict: Verdict) -> str:
    """Return a line that says whether the plan fits, with the number of findings."""
    severities = [finding.severity for finding in verdict.findings]
    counts = [pluralize(severities.count(name), name) for name in ("error", "warning", "note") if name in severities]
    words = (verdict.memory or "fits") if verdict.fits else _refusal(verdict)
    return f"{words} ({', '.join(counts)})" if counts else words


def _refusal(verdict: Verdict) -> str:
    errors = [finding.code for finding in verdict.findings if finding.severity == "error"]
    if not errors:
        return "refused, because warnings are errors"
    if verdict.exceeds_limit:
        return "does not fit"
    # Findings GP2xx mean that the plan belongs to another profile, so its memory was not checked.
    is_stale = any(code.startswith("GP2") for code in errors)
    return "does not fit this profile" if is_stale else f"refused: {rule_of(errors[0]).title}"


def _answer(verdict: Verdict) -> Text:
    words, _, counts = verdict_words(verdict).partition(" (")
    return Text.assemble((words, _COLOR_OF_ANSWER.get(words, "bold red")), f" ({counts}" if counts else "")


def rules_text(rules: Sequence[Rule], style: Style) -> str:
    """Return the code, meaning, importance and remedy of each kind of finding."""
    parts: list[RenderableType] = []
    for rule in rules:
        parts.append(heading(printable(f"{rule.code} ({rule.severity}): {rule.title}")))
        for title, text in (("meaning", rule.meaning), ("why", rule.why), ("what to do", rule.remedy)):
            parts.append(_indented(f"{title}: {text}", 2))
        parts.append(BLANK)
    return render(style, *parts[:-1])


def _indented(text: str, columns: int) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, columns), expand=False)
