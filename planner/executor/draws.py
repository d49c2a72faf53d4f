"""Batches that come out alike on every rank and in every run, whatever else draws random numbers meanwhile."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["drawn_alike"]


def drawn_alike(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """`batches`, made with a random state of their own.

    A loader shuffles with torch's global state, which every stage advances in its own way: the first stage's inputs
    would not belong to the last one's targets, and a resumed run would go on in another order.

    Args:
        batches: Nothing of it may have been drawn yet.
        seed: Where that state starts.
    """
    own = torch.Generator().manual_seed(seed).get_state()
    source = iter(_lazily(batches))
    while True:
        others = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batch = next(source)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(others)
        yield batch


# Private functions


def _lazily(batches: Iterable[Any]) -> Iterator[Any]:
    # `iter` of a loader draws, too.
    yield from batches
