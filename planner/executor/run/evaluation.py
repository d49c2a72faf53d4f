"""Micro-batches through the stages of a process without gradients.

No engine: forwards in a row need no schedule, may be of any number, and hold no more than one micro-batch that comes
in and one that goes out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from planner.core.errors import UsageError
from planner.core.values.precision import Precision
from planner.executor.run.placement import Place
from planner.executor.run.stage_module import StageModule
from planner.executor.run.transfers import Message, Transfers
from planner.model.autocast import keeping_casts, layers_in

Metrics = Callable[[Any, Any], Mapping[str, Any]]
"""Numbers of an output and its target, by name: means over the samples of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation of a batch found."""

    loss: float
    metrics: Mapping[str, float]
    """Means over all samples, of all replicas; as the loss the same on every rank."""
    outputs: Any = None
    """The outputs of this rank's part of the batch, in the host's memory, with the last stage; None elsewhere."""


class Observed:
    """Sees the outputs of the last stage go by, for the user's metrics, and keeps them if it is to."""

    def __init__(self, metrics: Metrics | None, *, keeps_outputs: bool) -> None:
        self._metrics, self._keeps_outputs = metrics, keeps_outputs
        self._outputs: list[Any] = []
        self.samples = 0
        self.sums: dict[str, float] = {}
        """The sum of every metric over the samples seen."""

    def see(self, size: int, targets: Sequence[Any], micro_batch: int, output: Any) -> None:
        """One output, as `loss_fn` gets it, of micro-batches of so many samples.

        Raises:
            UsageError: The metrics are no numbers, or others than of the micro-batch before.
        """
        if self._keeps_outputs:
            self._outputs.append(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output))
        if self._metrics is not None:
            now = _numbers(self._metrics(output, targets[micro_batch]))
            if self.samples and set(now) != set(self.sums):
                raise UsageError(
                    f"`metrics` gave {sorted(now)} for one micro-batch and {sorted(self.sums)} for another",
                    hint="give the same names for every micro-batch",
                )
            self.sums = {name: self.sums.get(name, 0.0) + value * size for name, value in now.items()}
        self.samples += size

    def outputs(self) -> Any:
        """All that were kept, put together along their first dimension; None where none were.

        What has none (a number of every micro-batch) gets one.
        """
        if not self._outputs:
            return None
        return tree_map(_together, *self._outputs)


@dataclass(frozen=True, kw_only=True)
class ForwardOnly:
    """The stages of one process, and where their neighbours are."""

    modules: Sequence[StageModule]
    place: Place
    device: torch.device
    precision: Precision

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Forward of every micro-batch, in evaluation mode; with the last stage, their losses, else none.

        `inputs` are the model's input tensors of every micro-batch with the first stage, else an empty one for each.
        """
        losses: list[Tensor] = []
        transfers = Transfers(self.device, None)
        with torch.no_grad(), keeping_casts(self.precision, self.device), ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.evaluating())
            for chunk, micro_batch in self._order(len(inputs)):
                message = Message("F", self.place.stages[chunk], micro_batch)
                output = self._forward(chunk, message, inputs[micro_batch], transfers)
                transfers.finish()  # one output is under way at a time
                behind = message.stage + 1
                if behind == self.place.num_stages:
                    losses.append(output)
                elif behind in self.place.stages:
                    transfers.hand_over(Message("F", behind, micro_batch), output)
                else:
                    transfers.send_output(message, output, self.place.rank_of(behind))
                del output  # the next forward would find it still there
            transfers.finish()
        return losses

    def _order(self, micro_batches: int) -> Iterator[tuple[int, int]]:
        """Chunk and micro-batch of every forward here.

        A single stage runs all micro-batches in a row; several take turns, each with as many as there are devices.
        """
        in_turn = max(1, micro_batches if len(self.modules) == 1 else self.place.num_devices)
        for begin in range(0, micro_batches, in_turn):
            turn = range(begin, min(begin + in_turn, micro_batches))
            yield from product(range(len(self.modules)), turn)

    def _forward(self, chunk: int, message: Message, inputs: Sequence[Tensor], transfers: Transfers) -> Any:
        module = self.modules[chunk]
        module.micro_batch = message.micro_batch
        if message.stage > 0:
            before = message.stage - 1
            if before not in self.place.stages:
                transfers.post(message, module.received.tensors, self.place.rank_of(before))
            inputs = transfers.take(message)
        with layers_in(self.precision, self.device):
            return module(*inputs)


def _numbers(values: Any) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"`metrics(output, target)` gave {str(values)[:80]}, expected a dict of numbers ({error})",
            hint='such as `{"accuracy": (output.argmax(-1) == target).float().mean()}`',
        ) from error


def _together(*leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0] if all(leaf is leaves[0] for leaf in leaves) else list(leaves)
    return torch.cat(leaves) if leaves[0].ndim else torch.stack(leaves)
