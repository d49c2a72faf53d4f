"""Send and receive tensors over stage boundaries, and release them as early as possible.

    receive   A buffer lives from the start of the receive to the end of the forward or backward that takes the tensor.
    output    A sent activation lives until the backward of its micro-batch, long after it was delivered.
    gradient  A sent gradient lives until the next gradient is sent. Then the rank waits for the end of the earlier
              send. No two ranks wait for each other (see `planner.core.schedule.instruction_lists`).

Only `isend`, `irecv` and their handles are used. Both processes of a pair begin their common transfers in the same
order, as gloo and NCCL require. NCCL runs the transfers of a pair one after another.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from planner.core.schedule import Letter
from planner.model.layout import in_memory_order, match_layout


class MessageKey(NamedTuple):
    """Key of a message between stages: the action of this process that sends or needs the message."""

    kind: Letter
    stage: int
    micro_batch: int


class _PendingTransfer(NamedTuple):
    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]


class Transfers:
    """Sender and receiver of messages between this process and other processes of `group`."""

    def __init__(self, device: torch.device, group: ProcessGroup | None) -> None:
        self._device, self._group = device, group
        self._coming: dict[MessageKey, _PendingTransfer] = {}
        self._in_place: dict[MessageKey, tuple[Tensor, ...]] = {}
        self._outputs: dict[MessageKey, _PendingTransfer] = {}
        self._gradient: _PendingTransfer | None = None

    def post(self, message: MessageKey, shapes: Sequence[Tensor], rank: int) -> None:
        """Begin to receive tensors like those in `shapes` from another process.

        Args:
            message: Key of the message to receive.
            shapes: Tensors on the meta device, with shape, strides and dtype of the buffers.
            rank: Rank of the sending process.
        """
        buffers = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device) for x in shapes)
        works = (dist.irecv(in_memory_order(buffer), rank, group=self._group) for buffer in buffers)
        self._coming[message] = _PendingTransfer(buffers, tuple(filter(None, works)))

    def take(self, message: MessageKey) -> tuple[Tensor, ...]:
        """Wait for a message, and return its tensors."""
        if message in self._in_place:
            return self._in_place.pop(message)
        coming = self._coming.pop(message)
        wait_for_all(coming.works)
        return coming.tensors

    def hand_over(self, message: MessageKey, tensors: tuple[Tensor, ...]) -> None:
        """Store tensors that a stage passes to another stage of the same process."""
        self._in_place[message] = tensors

    def send_output(self, message: MessageKey, tensors: Sequence[Tensor], rank: int) -> None:
        """Begin to send the output of a forward.

        Args:
            message: Kind, stage and micro-batch of the forward; also the argument of `release_output`.
            tensors: Output tensors.
            rank: Rank of the receiving process.
        """
        self._outputs[message] = self._send([tensor.detach() for tensor in tensors], rank)

    def release_output(self, message: MessageKey) -> None:
        """Wait until the output of a forward is sent, and release its tensors."""
        sent = self._outputs.pop(message, None)
        if sent is not None:
            wait_for_all(sent.works)

    def send_gradient(self, tensors: Sequence[Tensor], shapes: Sequence[Tensor], rank: int) -> None:
        """Begin to send gradients in the layout of the receiver's buffers, and wait until the previous ones are sent.

        Args:
            tensors: Gradients to send.
            shapes: Tensors on the meta device with the receiver's layout.
            rank: Rank of the receiving process.
        """
        before = self._gradient
        self._gradient = self._send([match_layout(x, shape) for x, shape in zip(tensors, shapes, strict=True)], rank)
        if before is not None:
            wait_for_all(before.works)

    def wait_until_sent(self) -> None:
        """Wait at the end of a step until all tensors are sent."""
        for message in list(self._outputs):
            self.release_output(message)
        if self._gradient is not None:
            wait_for_all(self._gradient.works)
        self._gradient = None

    def _send(self, tensors: Sequence[Tensor], rank: int) -> _PendingTransfer:
        flat = tuple(map(in_memory_order, tensors))
        works = (dist.isend(tensor, rank, group=self._group) for tensor in flat)
        return _PendingTransfer(flat, tuple(filter(None, works)))


def wait_for_all(works: Iterable[dist.Work]) -> None:
    """Wait until all transfers have ended."""
    for work in works:
        work.wait()
