"""Location and full text of a finding."""

from dataclasses import dataclass

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """File of the plan."""

    path: str
    """Name given by the user; `-` is standard input."""
    stage_lines: tuple[int, ...] = ()
    """Line of every stage, from 1; empty if unknown."""

    @property
    def is_file(self) -> bool:
        """True if the plan is in a file."""
        return self.path != "-"

    def line(self, finding: Finding) -> int:
        """Return the line of the finding's stage, or 1."""
        if finding.stage is None or finding.stage >= len(self.stage_lines):
            return 1
        return self.stage_lines[finding.stage]


def full_message(finding: Finding, verdict: Verdict) -> str:
    """Return the finding, its hint, and what would fit, one per line, for formats with one text per finding."""
    lines = [finding.message, finding.hint] if finding.hint else [finding.message]
    if finding.code == "GP101":
        lines += verdict.would_fit
    return "\n".join(lines)
