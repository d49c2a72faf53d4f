"""Interface of every search: it takes a case, a step time to beat and a deadline, and returns an answer."""

from typing import NamedTuple, Protocol

from planner.core.cost.partition import Partition
from planner.solve.deadline import Deadline
from planner.solve.space.case import Case


class Answer(NamedTuple):
    """Best partition found, or None if none beats the given step time, with a lower bound of all partitions."""

    case: Case
    partition: Partition | None
    step_us: float
    """Infinite without a partition."""
    lower_bound_us: float
    method: str
    actions: int = 0
    """Number of actions simulated by a search of bounded effort."""


class Search(Protocol):
    """Search for the fastest plan of one case."""

    def __call__(self, case: Case, *, upper_us: float, deadline: Deadline) -> Answer:
        """Return the best partition found that is faster than `upper_us`, and a lower bound of all partitions.

        Raises:
            OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
        """
