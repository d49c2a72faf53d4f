"""Deadline of a search, created once per request, so that no search reads a clock itself."""

import time
from dataclasses import dataclass, replace
from math import inf
from typing import Final


class OutOfTimeError(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Time limit of a search, and limit on its simulated actions."""

    ends_s: float
    """End time in seconds of `time.monotonic`; infinite without a limit."""
    most_actions: int | None = None
    """Number of actions that a search may simulate; tables count as well. None: a limit of some seconds, in which only
    simulation counts."""

    @classmethod
    def after(cls, limit_s: float | None) -> "Deadline":
        """Return the deadline `limit_s` seconds from now; None for no limit."""
        return NEVER if limit_s is None else cls(ends_s=time.monotonic() + limit_s)

    @property
    def is_limited(self) -> bool:
        """Return True if there is a time limit."""
        return self.ends_s < inf

    @property
    def left_s(self) -> float:
        """Seconds left; negative after the deadline."""
        return self.ends_s - time.monotonic()

    def share(self, part: float) -> "Deadline":
        """Return a deadline after that part of the time left; without a limit, return this one."""
        return replace(self, ends_s=time.monotonic() + part * max(0.0, self.left_s)) if self.is_limited else self

    def check(self) -> None:
        """Raise `OutOfTimeError` if the deadline has passed."""
        if self.left_s < 0:
            raise OutOfTimeError


NEVER: Final = Deadline(ends_s=inf)
