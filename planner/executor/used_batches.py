"""Number of mini-batches that the steps of a run have used, from which a resumed run continues."""

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.model.load import Batch


class UsedBatches:
    """Counter of the mini-batches that `Pipeline.batches` yields and steps use.

    A step may use none or several. A loop may get mini-batches before it uses them.
    """

    def __init__(self) -> None:
        self.num_used = 0
        """Number of mini-batches up to the last used one, including earlier ones that no step has used."""
        self._num_taken = 0
        self._numbers: dict[int, tuple[ref[Tensor], int]] = {}
        """By `id` of each existing tensor of a mini-batch: the tensor, and the number of the mini-batch from 1."""

    def begin(self, num_used: int) -> None:
        """Set the number of mini-batches that steps have used, for example after a resume."""
        self.num_used = self._num_taken = num_used

    def take(self, batch: Batch) -> None:
        """Record that the script gets the next mini-batch."""
        self._num_taken += 1
        self._numbers = {key: pair for key, pair in self._numbers.items() if pair[0]() is not None}
        self._numbers |= {id(tensor): (ref(tensor), self._num_taken) for tensor in _tensors(batch)}

    def used(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches of a step, and record that they are used.

        A mini-batch is recognized by its tensors, which `take` has recorded. If the script has replaced all of these
        tensors, all mini-batches that the script has got so far count as used.
        """
        for batch in batches:
            pairs = [(tensor, self._numbers[id(tensor)]) for tensor in _tensors(batch) if id(tensor) in self._numbers]
            # A new tensor may have the `id` of one that no longer exists.
            numbers = [number for tensor, (taken, number) in pairs if taken() is tensor]
            self.num_used = max(self.num_used, *numbers) if numbers else self._num_taken
            yield batch


def _tensors(batch: tuple[Any, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tuple(batch)) if isinstance(leaf, Tensor)]
