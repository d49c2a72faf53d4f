"""Verdicts in formats for continuous integration. These modules use only the standard library."""

from planner.show.gate.github import github_annotations
from planner.show.gate.junit import junit_xml
from planner.show.gate.markdown import comparison_markdown, rules_markdown, sweep_markdown, verdict_markdown
from planner.show.gate.plan_file import PlanFile
from planner.show.gate.sarif import sarif_log

__all__ = [
    "PlanFile",
    "comparison_markdown",
    "github_annotations",
    "junit_xml",
    "rules_markdown",
    "sarif_log",
    "sweep_markdown",
    "verdict_markdown",
]
