"""What a search says of one case."""

from typing import NamedTuple

from planner.core.costs import ChainCosts
from planner.core.evaluate import Partition

__all__ = ["Answer"]


class Answer(NamedTuple):
    """The best partition found, if there is one better than asked for, and what no partition can beat."""

    costs: ChainCosts
    partition: Partition | None
    step_us: float
    """Infinite without a partition."""
    lower_bound_us: float
    method: str
