"""What goes over a boundary: posted, awaited, and let go of as soon as it may be.

    receive   a buffer from posting it to the end of the backward (or forward) that takes it
    output    what a stage sent forward stays until its micro-batch's backward: then it has been delivered long ago
    gradient  what a stage sent back stays until the next gradient is sent: with one under way, waiting for those before
              it blocks nobody (see `planner.core.schedule.programs`), and holds no step up where M is a multiple of K

Only `isend`, `irecv` and their handles are used. Every two processes begin their transfers in the same order, which is
all that gloo and NCCL ask for: NCCL runs those of a pair one after the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from planner.core.schedule import Letter
from planner.model.layout import in_memory_order, laid_out


class Message(NamedTuple):
    """What one kind of work begins with: on which stage, for which micro-batch."""

    kind: Letter
    stage: int
    micro_batch: int


class _Coming(NamedTuple):
    """A message that is being received."""

    buffers: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]


class _Sent(NamedTuple):
    """A message that is being sent. The tensors must stay as long as it is."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]


class Transfers:
    """The messages of one process, with others of `group`; without one that is all there are."""

    def __init__(self, device: torch.device, group: ProcessGroup | None) -> None:
        self._device, self._group = device, group
        self._coming: dict[Message, _Coming] = {}
        self._in_place: dict[Message, tuple[Tensor, ...]] = {}
        self._outputs: dict[Message, _Sent] = {}
        self._gradient: _Sent | None = None

    def post(self, message: Message, shapes: Sequence[Tensor], rank: int) -> None:
        """Begins to receive tensors that lie as `shapes` do (on the meta device) from the process `rank`."""
        buffers = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device) for x in shapes)
        works = (dist.irecv(in_memory_order(buffer), rank, group=self._group) for buffer in buffers)
        self._coming[message] = _Coming(buffers, tuple(filter(None, works)))

    def take(self, message: Message) -> tuple[Tensor, ...]:
        """The tensors of a message, once they are there."""
        if message in self._in_place:
            return self._in_place.pop(message)
        coming = self._coming.pop(message)
        _wait(coming.works)
        return coming.buffers

    def hand_over(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Keeps a message from one stage of this process to another."""
        self._in_place[message] = tensors

    def send_output(self, message: Message, tensors: Sequence[Tensor], rank: int) -> None:
        """Begins to send what a forward made; `message` says what it made, and is let go of under that name."""
        self._outputs[message] = self._send([tensor.detach() for tensor in tensors], rank)

    def let_go_of_output(self, message: Message) -> None:
        """Ends the sending of an output, if that is still under way."""
        sent = self._outputs.pop(message, None)
        if sent is not None:
            _wait(sent.works)

    def send_gradient(self, tensors: Sequence[Tensor], shapes: Sequence[Tensor], rank: int) -> None:
        """Begins to send what a backward made, lying as the receiver's buffers do, and ends the sending before it."""
        before = self._gradient
        self._gradient = self._send([laid_out(x, shape) for x, shape in zip(tensors, shapes, strict=True)], rank)
        if before is not None:
            _wait(before.works)

    def finish(self) -> None:
        """Ends all sending at the end of a step."""
        for message in list(self._outputs):
            self.let_go_of_output(message)
        if self._gradient is not None:
            _wait(self._gradient.works)
        self._gradient = None

    def _send(self, tensors: Sequence[Tensor], rank: int) -> _Sent:
        flat = tuple(map(in_memory_order, tensors))
        works = (dist.isend(tensor, rank, group=self._group) for tensor in flat)
        return _Sent(flat, tuple(filter(None, works)))


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
