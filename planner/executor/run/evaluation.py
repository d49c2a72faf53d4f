"""Run micro-batches through the stages of a process without gradients.

Forwards alone need no schedule, so the engine is not used. The number of micro-batches is arbitrary. A process holds at
most one received and one sent micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from planner.core.errors import UsageError
from planner.core.values.precision import Precision
from planner.executor.run.placement import ProcessGroups, ProcessPlace
from planner.executor.run.stage_module import StageModule
from planner.executor.run.transfers import MessageKey, Transfers
from planner.model.autocast import forward_context, weight_cast_cache

Metrics = Callable[[Any, Any], Mapping[str, Any]]
"""Function from an output and its target to numbers by name: means over the samples of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Loss, metrics and outputs of a batch in evaluation mode."""

    loss: float
    metrics: Mapping[str, float]
    """Means over all samples of all replicas; the same on every rank, like the loss."""
    outputs: Any = None
    """Outputs of this rank's part of the batch, in host memory, on the last stage; None on others."""


class MetricsCollector:
    """Sums of the user's metrics over the last stage's outputs, and the outputs if requested."""

    def __init__(self, metrics: Metrics | None, *, keeps_outputs: bool) -> None:
        self._metrics, self._keeps_outputs = metrics, keeps_outputs
        self._outputs: list[Any] = []
        self.samples = 0
        self.sums: dict[str, float] = {}
        """Sum of each metric over all observed samples."""

    def observe(self, size: int, targets: Sequence[Any], micro_batch: int, output: Any) -> None:
        """Add the metrics of one micro-batch's output, and keep the output if requested.

        Args:
            size: Number of samples in a micro-batch.
            targets: Targets of every micro-batch.
            micro_batch: Index of the micro-batch.
            output: Output of the model for this micro-batch, as `loss_fn` gets it.

        Raises:
            UsageError: The metrics are not numbers, or have other names than those of the previous micro-batch.
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
        """Return the kept outputs, concatenated along their first dimension (scalars stacked); None without outputs."""
        if not self._outputs:
            return None
        return tree_map(_together, *self._outputs)


@dataclass(frozen=True, kw_only=True)
class ForwardRunner:
    """Runner of forwards without gradients, for the stages of one process."""

    modules: Sequence[StageModule]
    place: ProcessPlace
    device: torch.device
    precision: Precision

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Run the forward of every micro-batch in evaluation mode, and return the losses.

        `inputs` has the model's input tensors for every micro-batch on the first stage, and empty sequences elsewhere.
        The result is empty on ranks without the last stage.
        """
        losses: list[Tensor] = []
        transfers = Transfers(self.device, None)
        with torch.no_grad(), weight_cast_cache(self.precision, self.device), ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.evaluation_mode())
            for chunk, micro_batch in self._order(len(inputs)):
                message = MessageKey("F", self.place.stages[chunk], micro_batch)
                output = self._forward(chunk, message, inputs[micro_batch], transfers)
                transfers.wait_until_sent()  # at most one output is being sent
                behind = message.stage + 1
                if behind == self.place.num_stages:
                    losses.append(output)
                elif behind in self.place.stages:
                    transfers.hand_over(MessageKey("F", behind, micro_batch), output)
                else:
                    transfers.send_output(message, output, self.place.rank_of(behind))
                del output  # release it before the next forward
            transfers.wait_until_sent()
        return losses

    def _order(self, micro_batches: int) -> Iterator[tuple[int, int]]:
        """Yield (index among this process's stages, micro-batch) for every forward, in order.

        Several stages take turns. In its turn, a stage runs K micro-batches, where K is the number of devices.
        """
        in_turn = max(1, micro_batches if len(self.modules) == 1 else self.place.num_devices)
        for begin in range(0, micro_batches, in_turn):
            turn = range(begin, min(begin + in_turn, micro_batches))
            yield from product(range(len(self.modules)), turn)

    def _forward(self, chunk: int, message: MessageKey, inputs: Sequence[Tensor], transfers: Transfers) -> Any:
        module = self.modules[chunk]
        module.micro_batch = message.micro_batch
        if message.stage > 0:
            before = message.stage - 1
            if before not in self.place.stages:
                transfers.post(message, module.received.tensors, self.place.rank_of(before))
            inputs = transfers.take(message)
        with forward_context(self.precision, self.device):
            return module(*inputs)


def mean_results(
    loss: Tensor | float,
    observed: MetricsCollector,
    place: ProcessPlace,
    groups: ProcessGroups,
    *,
    device: torch.device,
) -> tuple[float, dict[str, float]]:
    """Return the loss and the mean metrics over all replicas. Every rank must call this function.

    Args:
        loss: Sum of the weighted losses of this rank's micro-batches; read on the last stage only.
        observed: Metrics of this rank's micro-batches; read on the last stage only.
        place: Place of this process in the job.
        groups: Process groups of this process.
        device: Device of the tensors that ranks exchange.
    """
    box: list[Any] = [None]
    if place.is_last:
        names = sorted(observed.sums)
        numbers = [loss, observed.samples, *(observed.sums[name] for name in names)]
        totals = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
        if groups.replicas is not None:
            dist.all_reduce(totals, group=groups.replicas)
        box = [(names, totals.tolist())]
    if place.num_devices > 1:
        last = place.rank_of(place.num_stages - 1)
        dist.broadcast_object_list(box, src=last, group=groups.pipeline, device=device)
    names, (loss_of_all, samples, *sums) = box[0]
    return loss_of_all, {name: total / samples for name, total in zip(names, sums, strict=True)}


def _numbers(values: Any) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in values.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"`metrics(output, target)` gave {str(values)[:80]}, expected a dict of numbers ({error})",
            hint='return, for example, `{"accuracy": (output.argmax(-1) == target).float().mean()}`',
        ) from error


def _together(*leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0] if all(leaf is leaves[0] for leaf in leaves) else list(leaves)
    return torch.cat(leaves) if leaves[0].ndim else torch.stack(leaves)
