"""Send the loss and the metrics of an evaluation from the last stage to every rank of the pipeline, rank by rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.run.placement import ProcessGroups, ProcessPlace
from planner.executor.run.transfers import wait_for_all


class MetricsRelay:
    """Relay of scalar metrics along the pipeline.

    Every rank calls the same methods after the same steps. Tensors are float64 on `device`.
    """

    def __init__(self, place: ProcessPlace, groups: ProcessGroups, device: torch.device) -> None:
        self._place, self._groups, self._device = place, groups, device

    def sum_over_replicas(self, values: Sequence[Tensor | float], num_values: int) -> list[float]:
        """Return the metrics of the last stage, summed over replicas.

        Args:
            values: Metrics of this rank; read on the last stage only.
            num_values: Number of metrics; equal on all ranks.

        Returns:
            `num_values` floats, equal on every rank of the pipeline.
        """
        place = self._place
        # The last stage is on the last device of a loop, and on the first device of a V.
        onwards = -1 if place.position_of(place.num_stages - 1) else 1
        if place.is_last:
            numbers = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in values])
            if self._groups.replicas is not None:
                dist.all_reduce(numbers, group=self._groups.replicas)
        else:
            numbers = torch.empty(num_values, dtype=torch.float64, device=self._device)
            sender = self._rank_at(place.position - onwards)
            wait_for_all(start_transfer(dist.irecv, numbers, sender, self._groups.pipeline))
        if 0 <= place.position + onwards < place.num_devices:
            to = self._rank_at(place.position + onwards)
            wait_for_all(start_transfer(dist.isend, numbers, to, self._groups.pipeline))
        sums: list[float] = numbers.tolist()
        return sums

    def broadcast_names(self, names: Sequence[str]) -> list[str]:
        """Return the last stage's metric names, sorted, on every rank."""
        box = [sorted(names)]
        if self._place.num_devices > 1:
            last = self._place.rank_of(self._place.num_stages - 1)
            dist.broadcast_object_list(box, src=last, group=self._groups.pipeline, device=self._device)
        return box[0]

    def _rank_at(self, position: int) -> int:
        return self._place.rank_of(position)  # stage k < K is on device k, in a loop and in a V


def start_transfer(
    operation: Callable[..., Any], numbers: Tensor, rank: int, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Begin to send numbers to a rank, or to receive numbers from it.

    Args:
        operation: `dist.isend` or `dist.irecv`.
        numbers: Tensor to send, or to receive into.
        rank: Rank of the other process.
        group: Process group; None for all processes.

    Returns:
        Handles to wait for.
    """
    # As a batch of one operation, because NCCL then needs no communicator, and no memory, for this pair of ranks.
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, numbers, rank, group=group)])
    return works
