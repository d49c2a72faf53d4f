"""Deadline of a search. It is created once per request. No other part of the solver reads a clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from planner.core.values.plan import ScheduleName


class OutOfTimeError(Exception):
    """Error about a search whose time limit has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchObserver:
    """Callbacks of a search."""

    is_stopped: Callable[[], bool] = lambda: False
    """Called often; True ends the search with the best plan so far."""
    on_plan: Callable[[float, ScheduleName, float], None] = lambda *_: None
    """Called for each faster plan, with its step time, its schedule, and a lower bound of all step times."""


UNWATCHED: Final = SearchObserver()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Time limit of a search, and limit on its simulated actions."""

    ends_s: float
    """End time in seconds of `time.monotonic`; infinite without a limit."""
    most_actions: int | None = None
    """Limit on simulated actions; None for a default limit."""
    least_us: float = 0.0
    """Lower bound of the step time of all plans, for `SearchObserver.on_plan`."""
    best_us: float = inf
    """Step time of the best plan so far. A search ends when its lower bound reaches this time."""
    enough_us: float = inf
    """Smallest lower bound of earlier cases. A search need not raise its case's lower bound above this time,
    because only the smallest bound of all cases counts."""
    watch: SearchObserver = UNWATCHED

    @classmethod
    def after(cls, limit_s: float | None, watch: SearchObserver = UNWATCHED) -> "Deadline":
        """Return a deadline `limit_s` seconds from now, or without a time limit if `limit_s` is None."""
        return cls(ends_s=inf if limit_s is None else time.monotonic() + limit_s, watch=watch)

    @property
    def is_limited(self) -> bool:
        """Return True if there is a time limit."""
        return self.ends_s < inf

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it, or if `watch` stopped the search."""
        return -inf if self.watch.is_stopped() else self.ends_s - time.monotonic()

    def share(self, part: float) -> "Deadline":
        """Return a deadline after the fraction `part` of the remaining time; `self` if there is no time limit."""
        return replace(self, ends_s=time.monotonic() + part * max(0.0, self.left_s)) if self.is_limited else self

    def report_plan(self, step_us: float, schedule: ScheduleName) -> None:
        """Report the step time and schedule of a new plan to `watch`."""
        self.watch.on_plan(step_us, schedule, self.least_us)

    def check(self) -> None:
        """Raise `OutOfTimeError` if the deadline has passed, or if `watch` stopped the search."""
        if self.left_s < 0:
            raise OutOfTimeError


NEVER: Final = Deadline(ends_s=inf)
