"""When a search has to end: a value made where the question comes in, so that no search reads a clock itself."""

import time
from dataclasses import dataclass, replace
from math import inf
from typing import Final


class OutOfTimeError(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A point in time."""

    ends_s: float
    """By the clock of `time.monotonic`; infinite where there is no limit."""
    most_actions: int | None = None
    """Number of actions that a search may simulate, tables counted in; None: simulation alone counts, and ends with
    what takes some seconds."""

    @classmethod
    def after(cls, limit_s: float | None) -> "Deadline":
        """The deadline of a search that begins now and may take `limit_s` seconds; None for no limit."""
        return NEVER if limit_s is None else cls(ends_s=time.monotonic() + limit_s)

    @property
    def is_limited(self) -> bool:
        """Return True if there is a time limit."""
        return self.ends_s < inf

    @property
    def left_s(self) -> float:
        """Seconds until then, below 0 afterwards."""
        return self.ends_s - time.monotonic()

    def share(self, part: float) -> "Deadline":
        """The deadline after that part of the time left; the same where there is no limit."""
        return replace(self, ends_s=time.monotonic() + part * max(0.0, self.left_s)) if self.is_limited else self

    def check(self) -> None:
        """Raises `OutOfTimeError` if it is over."""
        if self.left_s < 0:
            raise OutOfTimeError


NEVER: Final = Deadline(ends_s=inf)
