"""Whose checkpoints: a run and its branches, so that none takes another's for its own.

A run gets a name when it begins, and every checkpoint says which run wrote it. A run that goes on from its newest
checkpoint stays what it is. One that goes on from an earlier one, or in another folder, is a branch of it: what was
written after the branching point belongs to another branch, though its steps have higher numbers.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Lineage"]


@dataclass(frozen=True)
class Lineage:
    """The branches that lead to a run, the first of them the run itself as it was begun."""

    branches: tuple[tuple[str, int], ...] = ()
    """Name of each, and after how many steps it began. Empty for checkpoints that say nothing."""

    @classmethod
    def new(cls) -> "Lineage":
        """A run that begins."""
        return cls().branched(0)

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> "Lineage":
        """That of the run which wrote a checkpoint."""
        return cls(tuple((str(name), int(step)) for name, step in description.get("branches", ())))

    @property
    def run(self) -> str:
        """Name of the run that it all began with."""
        return self.branches[0][0] if self.branches else ""

    def branched(self, step: int) -> "Lineage":
        """A branch that goes on after `step` steps."""
        return Lineage((*self.branches, (uuid.uuid4().hex, step)))

    def includes(self, other: "Lineage", step: int) -> bool:
        """Whether a checkpoint that `other` wrote after `step` steps lies behind this run, and is its own to remove."""
        shared = len(other.branches)
        if self.branches[:shared] != other.branches:
            return False
        return shared == len(self.branches) or step <= self.branches[shared][1]
