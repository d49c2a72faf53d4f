"""Batches that come out alike on every rank and in every run, whatever else draws random numbers meanwhile."""

from collections.abc import Iterable, Iterator
from typing import Any

from planner.executor.run.random_state import HostStates

__all__ = ["OwnStates", "drawn_alike"]


def drawn_alike(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """`batches`, made with random states of their own: torch's, Python's and NumPy's.

    A loader shuffles with the global ones, which every stage advances in its own way: the first stage's inputs would
    not belong to the last one's targets, and a resumed run would go on in another order.

    Args:
        batches: Nothing of it may have been drawn yet.
        seed: Where that state starts.
    """
    states = OwnStates(HostStates.seeded(seed))
    source = iter(_lazily(batches))

    def drawn() -> Any:
        with states:
            return next(source, None)

    # No variable may hold a batch while it is used.
    yield from iter(drawn, None)


class OwnStates:
    """Random states that are the process's within a block, and go on where they were in the next one."""

    def __init__(self, states: HostStates) -> None:
        self.states = states

    def __enter__(self) -> None:
        """Puts them in place of the process's."""
        self._others = HostStates.now()
        self.states.restore()

    def __exit__(self, *_: object) -> None:
        """Takes them out again."""
        self.states = HostStates.now()
        self._others.restore()


# Private functions


def _lazily(batches: Iterable[Any]) -> Iterator[Any]:
    # `iter` of a loader draws, too.
    yield from batches
