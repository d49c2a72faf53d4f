"""What a search says of one case."""

from typing import NamedTuple

from planner.core.cost.evaluate import Partition
from planner.solve.space.case import Case


class Answer(NamedTuple):
    """The best partition found, if there is one better than asked for, and what no partition can beat."""

    case: Case
    partition: Partition | None
    step_us: float
    """Infinite without a partition."""
    lower_bound_us: float
    method: str
    actions: int = 0
    """What a search of bounded effort has spent, in actions simulated."""
