"""Cut a mini-batch into micro-batches of the planned size. Remaining samples form a smaller micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from planner.core.errors import UsageError
from planner.model.inputs import BATCH_FIRST, PLAIN_CONTAINERS, unsplittable_type_name
from planner.model.load import Batch


@dataclass(frozen=True)
class MiniBatchPart:
    """Part of a mini-batch: micro-batches of equal size, which the engine runs in one call."""

    batch: Batch
    micro_batches: int
    micro_batch_size: int

    @property
    def num_samples(self) -> int:
        """Number of samples in all micro-batches of this part."""
        return self.micro_batches * self.micro_batch_size


def tensors_in_value(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


_TENSOR = object()
"""Placeholder for each tensor that `extract_tensors` takes out of a nested value."""


def extract_tensors(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors in a nested value, and a function that rebuilds the value with other tensors."""
    leaves, spec = tree_flatten(value)
    # Use placeholders, because `rebuild` must not keep the tensors alive.
    frame = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        following = iter(tensors)
        return tree_unflatten([next(following) if leaf is _TENSOR else leaf for leaf in frame], spec)

    return tensors_in_value(leaves), rebuild


def count_samples(batch: Batch) -> int | None:
    """Return the number of samples in a mini-batch; None if it has no tensors.

    Raises:
        UsageError: Tensors of the mini-batch have different numbers of samples, or no samples, or they are in an object
            that cannot be cut into micro-batches.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_in_value(tuple(batch))})
    if len(sizes) > 1 or sizes == [0]:
        raise UsageError(
            f"got a mini-batch whose tensors hold {' and '.join(map(str, sizes))} samples",
            hint=BATCH_FIRST,
        )
    kind = unsplittable_type_name(tuple(batch), sizes[0]) if sizes else ""
    if kind:
        raise UsageError(
            f"got a mini-batch with a {kind}, which cannot be cut into micro-batches", hint=PLAIN_CONTAINERS
        )
    return sizes[0] if sizes else None


def mini_batch_parts(
    batch: Batch, size: int, micro_batch_size: int, *, micro_batches_per_round: int = 1
) -> Iterator[MiniBatchPart]:
    """Yield the parts of a mini-batch. The schedule runs once for each part, with micro-batches of one size.

    Args:
        batch: Mini-batch. On this rank, inputs or targets or both may be missing.
        size: Number of samples in the mini-batch.
        micro_batch_size: Planned number of samples in a micro-batch.
        micro_batches_per_round: Number of micro-batches in a round of interleaved 1F1B; 1 for other schedules.
    """
    whole, rest = divmod(size, micro_batch_size)
    # Interleaved 1F1B needs rounds of equal size. If they are impossible, the last micro-batches form a separate part.
    odd = whole % micro_batches_per_round if whole % max(1, whole // micro_batches_per_round) else 0
    begin = 0
    for count, each in ((whole - odd, micro_batch_size), (odd, micro_batch_size), (min(rest, 1), rest)):
        if count:
            end = begin + count * each
            yield MiniBatchPart(_between(batch, begin, end) if count * each < size else batch, count, each)
            begin = end


def micro_batches_of(value: Any, count: int) -> list[Any]:
    """Cut the tensors of a nested value into `count` equal micro-batches: views along the first dimension."""
    tensors, rebuild = extract_tensors(value)
    size = tensors[0].shape[0] // count if tensors else 0
    return [rebuild([tensor.narrow(0, number * size, size) for tensor in tensors]) for number in range(count)]


def _between(value: Any, begin: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[begin:end], value)
