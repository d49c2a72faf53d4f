"""What the stages of a process are fed with: a mini-batch in parts, and what each micro-batch's loss counts for."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.executor.job import Job, Peers
from planner.executor.run.losses import UNCOUNTED, loss_counts, weights_of
from planner.executor.run.parts import Part, micro_batches_of, parts_of, size_of
from planner.model.load import Batch, LoadedModel, to_device
from planner.model.precision import to_precision

__all__ = ["Feeding"]


class Feeding:
    """How mini-batches enter the stages of one process.

    Args:
        job: What the process is to do.
        peers: The processes that it talks with.
        model: The model.
        micro_batch_size: Samples in a micro-batch, as planned.
    """

    def __init__(self, job: Job, peers: Peers, model: LoadedModel, micro_batch_size: int) -> None:
        self._job, self._peers, self._model = job, peers, model
        self._micro_batch_size = micro_batch_size

    def parts(self, batch: Batch) -> Iterator[Part]:
        """The parts in which this replica's mini-batch is trained on.

        Raises:
            UsageError: It is larger than planned.
        """
        balance = self._job.balance
        planned = balance.replica_batch
        size = size_of(batch) or planned
        if planned < size <= balance.batch:
            raise UsageError(
                f"got a mini-batch of {size} samples for a pipeline that is one of {balance.replicas}",
                hint="give each its own part: `inputs, targets = pipeline.own_part(inputs, targets)`",
            )
        if size > planned:
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {planned}",
                hint="plan for this batch, or give it in pieces to `accumulate`",
            )
        rounds_of = SCHEDULES[balance.schedule].round_size(self._job.place.num_devices)
        yield from parts_of(batch, size, self._micro_batch_size, rounds_of=rounds_of)

    def parts_of_any_size(self, batch: Batch) -> list[Part]:
        """The parts in which a batch is evaluated, which may be larger than planned."""
        return list(parts_of(batch, size_of(batch) or self._job.balance.replica_batch, self._micro_batch_size))

    def weights(self, parts: Sequence[Part]) -> list[float]:
        """What the loss of each micro-batch counts for, among those of all replicas; empty but with the last stage."""
        if not self._job.place.is_last:
            return []
        counts = [float(part.micro_batch_size) for part in parts for _ in range(part.micro_batches)]
        if self._model.loss_count is not None:
            targets = [target for part in parts for target in part.targets()]
            counts = loss_counts(self._model.loss_count, targets, self._model.source)
        total = torch.tensor(sum(counts), dtype=torch.float64, device=self._job.device)
        if self._peers.groups.replicas is not None:
            dist.all_reduce(total, group=self._peers.groups.replicas)
        return weights_of(counts, float(total))

    def input_tensors(self, part: Part) -> list[Tensor]:
        """The model's input tensors, on the device and in the precision planned; empty but with the first stage."""
        if not self._job.place.is_first:
            return []
        inputs = to_precision(to_device(part.batch.inputs, self._job.device), self._job.balance.dtype)
        return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]

    def targets(self, part: Part, weights: Sequence[float]) -> list[Any]:
        """The targets of every micro-batch; empty but with the last stage."""
        if not self._job.place.is_last:
            return []
        targets = micro_batches_of(to_device(part.batch.targets, self._job.device), part.micro_batches)
        return [target if weight else UNCOUNTED for target, weight in zip(targets, weights, strict=True)]
