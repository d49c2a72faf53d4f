"""Verdict, comparison and sweep as Markdown, for the summary of a CI job or a comment on a pull request."""

import re
from collections.abc import Sequence

from planner.core.judge.difference import Comparison, Difference
from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Rule
from planner.core.values.printable import printable
from planner.core.values.sweep import Sweep
from planner.show.gate.plan_file import PlanFile
from planner.show.terminal.verdict import verdict_words
from planner.show.views.comparison import (
    best_cluster_lines,
    comparison_notes,
    comparison_table,
    difference_table,
    sweep_table,
)
from planner.show.views.plan import plan_stage_table, step_rate_bubble_words
from planner.show.views.table import Table

_STAGES = ("stage", "layers", "recompute", "memory", "limit", "share")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def verdict_markdown(verdict: Verdict, plan_file: PlanFile) -> str:
    """Return the verdict, its findings, a table of the stages, and differences from another plan."""
    mark = "✅" if verdict.fits else "❌"
    parts = [f"### {mark} `{_code(plan_file.path)}`: {verdict_words(verdict)}"]
    for finding in verdict.findings:
        hint = f" {_text(_sentence(finding.hint))}" if finding.hint else ""
        parts.append(f"- **{finding.code}** {finding.severity}: {_text(_sentence(finding.message))}{hint}")
    parts += [f"- would fit: {_text(line)}" for line in verdict.would_fit]
    if verdict.plan is not None:
        stages = plan_stage_table(verdict.plan, brief=True).pick(*_STAGES)
        parts += ["", " · ".join(step_rate_bubble_words(verdict.plan, verdict.certainty)), "", *_table(stages)]
    if verdict.difference is not None:
        parts += ["", *_difference(verdict.difference)]
    return "\n".join(parts) + "\n"


def comparison_markdown(comparison: Comparison) -> str:
    """Return a table of the plans, and for two plans a table of the differences of their stages."""
    parts = _table(comparison_table(comparison))
    for note in comparison_notes(comparison):
        parts += ["", _text(note)]
    if comparison.difference is not None:
        parts += ["", *_difference(comparison.difference)]
    return "\n".join(parts) + "\n"


def sweep_markdown(sweep: Sweep) -> str:
    """Return a table of the sweep's cells, then the smallest, the fastest and the cheapest cluster."""
    return "\n".join([*_table(sweep_table(sweep)), "", *(_text(line) for line in best_cluster_lines(sweep))]) + "\n"


def rules_markdown(rules: Sequence[Rule]) -> str:
    """Return the text of `docs/findings.md`, which explains the findings."""
    parts = [
        "# Findings of `gpipe-plan check`",
        "",
        "This page is the output of `gpipe-plan explain --format markdown`. An error makes `check` fail (exit code 1).",
        "A warning does so with `check --strict`. A note never does.",
    ]
    for rule in rules:
        parts += ["", f"## {rule.code}: {rule.title}", "", f"*{rule.severity}*", "", rule.meaning]
        parts += ["", f"**Why it matters.** {rule.why}", "", f"**What to do.** {rule.remedy}"]
    return "\n".join(parts) + "\n"


def _difference(difference: Difference) -> list[str]:
    how = "" if difference.recomputed else " (its numbers are as stored, because its profile is missing)"
    return [f"Against `{_code(difference.against)}`{how}:", "", *_table(difference_table(difference))]


def _table(view: Table) -> list[str]:
    lines = [" | ".join(column.heading for column in view.columns), " | ".join("---" for _ in view.columns)]
    lines += [" | ".join(_text(item) for item in row) for row in view.rows()]
    return [f"| {line} |" for line in lines]


def _text(text: str) -> str:
    text = printable(text.replace("\n", " "))
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return _SPECIAL.sub(r"\\\1", text)
    return "".join(f"`{_code(p)}`" if n % 2 else _SPECIAL.sub(r"\\\1", p) for n, p in enumerate(pieces))


def _code(text: str) -> str:
    # In a table, even code must not contain an unescaped bar.
    return printable(text.replace("\n", " ")).replace("`", "'").replace("|", "\\|")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."
