"""Micro-batches through a stage without gradients.

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
    """One stage, and where its neighbours are."""

    module: StageModule
    device: torch.device
    precision: Precision
    before: int | None
    """Rank of the stage before; None in front of the first."""
    behind: int | None

    def run(self, inputs: Sequence[Sequence[Tensor]], shapes: Sequence[Tensor]) -> list[Tensor]:
        """Forward of every micro-batch, in evaluation mode.

        Args:
            inputs: First stage: the model's input tensors, of every micro-batch. Else an empty one for each.
            shapes: Of what the stage receives for one, on the meta device.

        Returns:
            Last stage: every micro-batch's loss. Else empty.
        """
        losses: list[Tensor] = []
        sent: list[tuple[Any, Tensor]] = []
        with ExitStack() as stack:
            for context in (torch.no_grad(), self.module.evaluating(), keeping_casts(self.precision, self.device)):
                stack.enter_context(context)
            for number, own in enumerate(inputs):
                self.module.micro_batch = number
                with layers_in(self.precision, self.device):
                    made = self.module(*(own if self.before is None else self._received(shapes)))
                _wait(sent)
                if self.behind is None:
                    losses.append(made)
                else:
                    sent = [(dist.isend(tensor, self.behind), tensor) for tensor in made]
                del made
            _wait(sent)
        return losses

    def _received(self, shapes: Sequence[Tensor]) -> list[Tensor]:
        tensors = [torch.empty(shape.shape, dtype=shape.dtype, device=self.device) for shape in shapes]
        for tensor in tensors:
            dist.recv(tensor, self.before)
        return tensors


def _wait(sent: list[tuple[Any, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()
    sent.clear()
