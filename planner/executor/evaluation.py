"""Micro-batches through the stages of a process without gradients.

No engine: forwards in a row need no schedule, may be of any number, and hold no more than one micro-batch that comes
in and one that goes out.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.precision import Precision
from planner.executor.stage_module import StageModule
from planner.model.autocast import keeping_casts, layers_in

__all__ = ["ForwardOnly"]


@dataclass(frozen=True, kw_only=True)
class ForwardOnly:
    """The stages of one process, and where their neighbours are."""

    modules: Sequence[StageModule]
    device: torch.device
    precision: Precision
    before: Sequence[int | None]
    """By stage, the rank of the one before; None in front of the first."""
    behind: Sequence[int | None]
    num_devices: int
    """K: with several stages on a process so many micro-batches go through one of them before the next has its turn."""

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Forward of every micro-batch, in evaluation mode.

        Args:
            inputs: With the first stage: the model's input tensors, of every micro-batch. Else an empty one for each.

        Returns:
            With the last stage: every micro-batch's loss. Else empty.
        """
        losses: list[Tensor] = []
        sent: list[tuple[Any, Tensor]] = []
        in_turn = len(inputs) if len(self.modules) == 1 else self.num_devices
        with ExitStack() as stack:
            for context in (torch.no_grad(), keeping_casts(self.precision, self.device)):
                stack.enter_context(context)
            for module in self.modules:
                stack.enter_context(module.evaluating())
            for begin in range(0, len(inputs), max(1, in_turn)):
                for stage in range(len(self.modules)):
                    for number in range(begin, min(begin + in_turn, len(inputs))):
                        made = self._forward(stage, number, inputs[number])
                        _wait(sent)
                        behind = self.behind[stage]
                        if behind is None:
                            losses.append(made)
                        else:
                            sent = [(dist.isend(tensor, behind), tensor) for tensor in made]
                        del made
            _wait(sent)
        return losses

    def _forward(self, stage: int, micro_batch: int, inputs: Sequence[Tensor]) -> Any:
        module, before = self.modules[stage], self.before[stage]
        module.micro_batch = micro_batch
        received = inputs if before is None else self._received(module.received.tensors, before)
        with layers_in(self.precision, self.device):
            return module(*received)

    def _received(self, shapes: Sequence[Tensor], before: int) -> list[Tensor]:
        tensors = [torch.empty(shape.shape, dtype=shape.dtype, device=self.device) for shape in shapes]
        for tensor in tensors:
            dist.recv(tensor, before)
        return tensors


def _wait(sent: list[tuple[Any, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()
    sent.clear()
