"""Verdicts in formats for continuous integration. These modules use only the standard library."""

from planner.show.gate.github import annotations
from planner.show.gate.junit import junit_xml
from planner.show.gate.markdown import comparison_markdown, rules_markdown, sweep_markdown, verdict_markdown
from planner.show.gate.place import Place
from planner.show.gate.sarif import sarif_log

__all__ = [
    "Place",
    "annotations",
    "comparison_markdown",
    "junit_xml",
    "rules_markdown",
    "sarif_log",
    "sweep_markdown",
    "verdict_markdown",
]
