"""Interface of all searches for a plan."""

from typing import NamedTuple, Protocol

from planner.core.cost.partition import Partition
from planner.solve.deadline import Deadline
from planner.solve.space.case import Case

SAME = 1e-12
"""Relative difference below which two times are equal; rounding causes such differences."""


class Answer(NamedTuple):
    """Result of a search: the best partition found, and a lower bound of the step time of all partitions."""

    case: Case
    partition: Partition | None
    """Best partition found; None if the search found none faster than the step time to beat."""
    step_us: float
    """Step time of the partition; infinite if there is none."""
    lower_bound_us: float
    """Lower bound of the step time of all partitions."""
    method: str
    """Name of the search method, for the plan's `SolverReport`."""
    actions: int = 0
    """Number of actions that the search has simulated."""


class PlanSearch(Protocol):
    """Function that searches for the fastest plan."""

    def __call__(self, case: Case, *, upper_us: float, deadline: Deadline) -> Answer:
        """Return the fastest partition found, if it beats `upper_us`, and a lower bound for all partitions.

        Raises:
            OutOfTimeError: `deadline` passed before anything was found, and `upper_us` is infinite.
        """
