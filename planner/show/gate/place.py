"""Where in which file a finding is shown, and what it says there in full."""

from dataclasses import dataclass

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The plan's file."""

    path: str
    """The name that the user gave; `-` is standard input."""
    stage_lines: tuple[int, ...] = ()
    """The line of every stage, from 1; none where they are not known."""

    @property
    def is_file(self) -> bool:
        """Whether there is a file to point at."""
        return self.path != "-"

    def line(self, finding: Finding) -> int:
        """Where to point: at the finding's stage, or at the top."""
        if finding.stage is None or finding.stage >= len(self.stage_lines):
            return 1
        return self.stage_lines[finding.stage]


def full_message(finding: Finding, verdict: Verdict) -> str:
    """What was found, what to do, and what would fit: one thing a line, for places that show nothing else."""
    lines = [finding.message, finding.hint] if finding.hint else [finding.message]
    if finding.code == "GP101":
        lines += verdict.would_fit
    return "\n".join(lines)
