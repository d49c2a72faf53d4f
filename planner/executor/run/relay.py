"""Numbers that the last stage knows, on every rank of its pipeline.

They go from process to process, from the one with the last stage to the other end, behind the gradients: a process
waits only for the one whose gradients it has just received, never for one that is still at work for it, as a broadcast
would make it wait.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.executor.run.placement import Groups, Place


class Relay:
    """Hands numbers on, in tensors on `device`; every rank of the job must call it, after the same steps."""

    def __init__(self, place: Place, groups: Groups, device: torch.device) -> None:
        self._place, self._groups, self._device = place, groups, device
        self._sent: tuple[list[dist.Work], Tensor] | None = None

    def everywhere(self, values: Sequence[Tensor | float], count: int) -> list[float]:
        """The sums over all replicas of so many `values`, which are those with the last stage."""
        place = self._place
        # The last stage is with the last device of a loop; a V ends where it began.
        onwards = -1 if place.position_of(place.num_stages - 1) else 1
        if place.is_last:
            numbers = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in values])
            if self._groups.replicas is not None:
                dist.all_reduce(numbers, group=self._groups.replicas)
        else:
            numbers = torch.empty(count, dtype=torch.float64, device=self._device)
            for work in transfer(dist.irecv, numbers, self._rank_at(place.position - onwards), self._groups.pipeline):
                work.wait()
        if 0 <= place.position + onwards < place.num_devices:
            self._wait()  # for those of the step before
            to = self._rank_at(place.position + onwards)
            self._sent = transfer(dist.isend, numbers, to, self._groups.pipeline), numbers
        sums: list[float] = numbers.tolist()
        return sums

    def names(self, names: Sequence[str]) -> list[str]:
        """What the last stage calls its numbers, on every rank of the pipeline."""
        box = [sorted(names)]
        if self._place.num_devices > 1:
            last = self._place.rank_of(self._place.num_stages - 1)
            dist.broadcast_object_list(box, src=last, group=self._groups.pipeline, device=self._device)
        return box[0]

    def finish(self) -> None:
        """Wait until the neighbor has what was sent last: a process that ends before takes it along."""
        self._wait()
        self._sent = None

    def _rank_at(self, position: int) -> int:
        return self._place.rank_of(position)  # stage k < K is with device k, in a loop and in a V

    def _wait(self) -> None:
        if self._sent is not None:
            for work in self._sent[0]:
                work.wait()


def transfer(
    operation: Callable[..., Any], numbers: Tensor, rank: int, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Begin to send numbers to a rank (`dist.isend`), or to receive them from it (`dist.irecv`).

    In a batch of one, so that NCCL needs no communicator, and no memory, for a pair of ranks alone.
    """
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, numbers, rank, group=group)])
    return works
