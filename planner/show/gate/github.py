"""Findings as GitHub workflow commands, which GitHub shows next to the lines of a pull request.

Texts are escaped as in GitHub's toolkit: github.com/actions/toolkit, packages/core/src/command.ts.
"""

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding, rule_of_code
from planner.core.values.printable import escape_unprintable, printable
from planner.show.gate.plan_file import PlanFile, full_message
from planner.show.terminal.verdict import verdict_words

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github_annotations(verdict: Verdict, plan_file: PlanFile) -> str:
    """Return a workflow command per finding, then the verdict as a line for the log."""
    lines = [_command(finding, verdict, plan_file) for finding in verdict.findings]
    return "\n".join([*lines, f"{_data(printable(plan_file.path))}: {verdict_words(verdict)}"])


def _command(finding: Finding, verdict: Verdict, plan_file: PlanFile) -> str:
    title = f"{finding.code} {rule_of_code(finding.code).title}"
    at = f"file={_property(plan_file.path)},line={plan_file.line(finding)}," if plan_file.is_file else ""
    return f"::{_COMMANDS[finding.severity]} {at}title={_property(title)}::{_data(full_message(finding, verdict))}"


def _data(text: str) -> str:
    shown = "\n".join(map(escape_unprintable, text.split("\n")))
    return shown.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
