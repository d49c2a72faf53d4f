"""Lines of findings in a plan's file, and full messages of findings."""

from dataclasses import dataclass

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """File of a plan, with the line of each stage."""

    path: str
    """Name of the file as the user gave it; `-` is standard input."""
    stage_lines: tuple[int, ...] = ()
    """Line number of every stage in the file, from 1; empty if unknown."""

    @property
    def is_file(self) -> bool:
        """True if the plan was read from a file, not from standard input."""
        return self.path != "-"

    def line(self, finding: Finding) -> int:
        """Return the line number of the finding's stage, or 1."""
        if finding.stage is None or finding.stage >= len(self.stage_lines):
            return 1
        return self.stage_lines[finding.stage]


def full_message(finding: Finding, verdict: Verdict) -> str:
    """Return a finding's message, its hint, and changes that would make the plan fit into memory, one per line."""
    lines = [finding.message, finding.hint] if finding.hint else [finding.message]
    if finding.code == "GP101":
        lines += verdict.would_fit
    return "\n".join(lines)
