"""Deadline of a search, created once per request, so that no search reads a clock itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from planner.core.values.plan import ScheduleName


class OutOfTimeError(Exception):
    """The time limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchObserver:
    """Observer of a search."""

    is_stopped: Callable[[], bool] = lambda: False
    """Called often; True ends the search with the best plan so far."""
    on_plan: Callable[[float, ScheduleName, float], None] = lambda *_: None
    """Called with the step time and schedule of a plan that was found, and a lower bound of all plans."""


UNWATCHED: Final = SearchObserver()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Time limit of a search, and limit on its simulated actions."""

    ends_s: float
    """End time in seconds of `time.monotonic`; infinite without a limit."""
    most_actions: int | None = None
    """Number of actions that a search may simulate; tables count as well. None: a limit of some seconds, in which only
    simulation counts."""
    enough_us: float = inf
    """Lower bound at which a search stops to improve its bound: the cases of other schedules have no higher one."""
    least_us: float = 0.0
    """Lower bound of all plans of the request, for `watch`."""
    watch: SearchObserver = UNWATCHED

    @classmethod
    def after(cls, limit_s: float | None, watch: SearchObserver = UNWATCHED) -> "Deadline":
        """Return the deadline `limit_s` seconds from now, or when `watch` stops the search; None for no limit."""
        return cls(ends_s=inf if limit_s is None else time.monotonic() + limit_s, watch=watch)

    @property
    def is_limited(self) -> bool:
        """Return True if there is a time limit."""
        return self.ends_s < inf

    @property
    def left_s(self) -> float:
        """Seconds left; negative after the deadline."""
        return -inf if self.watch.is_stopped() else self.ends_s - time.monotonic()

    def share(self, part: float) -> "Deadline":
        """Return a deadline after that part of the time left; without a limit, return this one."""
        return replace(self, ends_s=time.monotonic() + part * max(0.0, self.left_s)) if self.is_limited else self

    def note(self, step_us: float, schedule: ScheduleName) -> None:
        """Report a plan that was found."""
        self.watch.on_plan(step_us, schedule, self.least_us)

    def check(self) -> None:
        """Raise `OutOfTimeError` if the deadline has passed."""
        if self.left_s < 0:
            raise OutOfTimeError


NEVER: Final = Deadline(ends_s=inf)
