"""Run a schedule's instructions: forwards, backwards and transfers, over `torch.distributed` and autograd.

    for every instruction of this device (`planner.core.schedule.programs`):
        receive   post a buffer before it is needed, so that the transfer overlaps with computation
        run F     take the input, run the module, keep input and output until the backward
        run B     take the output's gradient, run autograd, keep the input's gradient until it is sent
        run I     the same without the gradients of weights: keep their operands (`planner.model.split_backward`)
        run W     compute the gradients of weights
        send      begin to send the result of an F, B or I

Tensors of stage s and micro-batch m, from the instruction that stores them to the one that releases them:

    name                 stored by       released by
    _inputs[m]           step            end of step            model input, first stage only
    _waiting[s, m]       F               B or I                 input and output of the stage
    _deferred[s, m]      I               W                      operands of deferred weight gradients
    _gradients[s, m]     B or I          send                   gradient of the stage's input
    _losses[m]           F               end of step            last stage only

The planner computes the cost of the same instructions. A schedule is data for both: this module knows none.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from planner.core.schedule import (
    KINDS,
    Instruction,
    Label,
    Letter,
    Schedule,
    devices_of,
    message_from,
    message_to,
    programs,
)
from planner.core.values.precision import Precision
from planner.executor.run.gradients import check_output
from planner.executor.run.replicas import is_of_replicas
from planner.executor.run.stage_module import StageModule
from planner.executor.run.transfers import Message, Transfers
from planner.executor.watch.position import Position
from planner.model.autocast import keeping_casts, layers_in
from planner.model.split_backward import DeferredUses, SplitBackward, additions_of


class Timer(Protocol):
    """Function that runs one action of a micro-batch and records its time."""

    def __call__(self, kind: Label, work: Callable[[], Any], *, micro_batch: int) -> Any:
        """Return the result of `work`."""


@dataclass(frozen=True, kw_only=True)
class EngineStage:
    """Stage that this process runs."""

    module: StageModule
    index: int
    """Index in the pipeline."""
    received: tuple[Tensor, ...]
    """Tensors from the previous stage, or the model's input; on the meta device."""
    sent: tuple[Tensor, ...]
    """Tensors for the next stage, or the loss; on the meta device."""
    timer: Timer
    last_backward: Callable[[Mapping[nn.Parameter, int] | None], AbstractContextManager[object]] = nullcontext
    """Returns the context of the stage's last backward (B, I or W) in a step; its argument is the number of additions
    to each gradient, if that is known."""


class _InFlight(NamedTuple):
    """Tensors that a micro-batch keeps on a stage between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Engine:
    """Stages of one process under their schedule.

    Args:
        stages: Stages in pipeline order; more than one only if the schedule is chunked.
        num_stages: Stages of the whole pipeline.
        ranks: Ranks of the pipeline, in the order of its devices.
        device: Device of the stages.
        schedule: The order of forwards and backwards.
        micro_batches: Number of micro-batches (M). It may be smaller than planned, for the last mini-batch.
        group: Processes of the pipeline; by default all.
        precision: Precision of the layers.
        position: Receives what this process does and waits for.
        check_nan: Whether every output must be finite; waits for the device.
    """

    def __init__(
        self,
        stages: Sequence[EngineStage],
        *,
        num_stages: int,
        ranks: Sequence[int],
        device: torch.device,
        schedule: Schedule,
        micro_batches: int,
        group: ProcessGroup | None = None,
        precision: Precision = "",
        position: Position | None = None,
        check_nan: bool = False,
    ) -> None:
        self.micro_batches = micro_batches
        self.loss_scale = 1.0
        self._stages = list(stages)
        self._num_stages, self._ranks = num_stages, ranks
        self._device, self._precision = device, precision
        self._position, self._check_nan = position or Position(), check_nan
        num_devices = len(ranks)
        order = [schedule.order(d, num_devices, micro_batches, len(stages)) for d in range(num_devices)]
        self._devices = devices_of(order)
        self._device_index = self._devices[stages[0].index]
        self._program = programs(order)[self._device_index]
        self._stage_at = {stage.index: stage for stage in stages}
        computed = [x for x in self._program if x.do == "run"]
        self._split_backwards = {(x.stage, x.micro_batch) for x in computed if x.kind == "I"}
        """Pairs (stage, micro-batch) whose backward is split into I and W."""
        self._num_backwards = Counter(x.stage for x in computed if KINDS[x.kind].follows is not None)
        """Number of backwards of each stage in a step; I and W count as one each."""
        self._split = SplitBackward(counts_only=is_of_replicas)
        self._deferred: dict[tuple[int, int], DeferredUses] = {}
        """Operands of deferred weight gradients, between I and W."""
        self._transfers = Transfers(device, group)
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._gradients: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """Gradient of a stage's input for a micro-batch, until it is sent."""
        self._inputs: list[tuple[Tensor, ...]] = []
        """Input tensors of the model, of every micro-batch."""
        self._losses: list[Tensor] = []
        self._loss_gradients: Sequence[Tensor] = ()

    def step(
        self, tensors: Sequence[Tensor], targets: Sequence[Any], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Run forward and backward of a mini-batch; gradients are added to those of the parameters.

        Args:
            tensors: Input tensors of the model with the mini-batch as first dimension, on the first stage; else empty.
            targets: Targets of every micro-batch, on the last stage; else empty.
            weights: Factors of the loss of every micro-batch, on the last stage; by default 1/M.

        Returns:
            The detached loss of every micro-batch times its weight, on the last stage; else empty. Gradients are those
            of
            these losses times `loss_scale`.
        """
        last = self._stages[-1]
        last.module.targets = list(targets)
        for stage in self._stages:
            stage.module.micro_batches = self.micro_batches
        weight: Tensor | None = None
        if last.index == self._num_stages - 1:
            weight = torch.tensor(weights or [1 / self.micro_batches] * self.micro_batches, dtype=torch.float64)
            self._loss_gradients = (weight * self.loss_scale).to(self._device).unbind()
        self._inputs = list(zip(*(tensor.tensor_split(self.micro_batches) for tensor in tensors), strict=True))
        self._losses = [torch.empty(0)] * self.micro_batches
        backwards_left = self._num_backwards.copy()
        with keeping_casts(self._precision, self._device), self._split.keeping_casts():
            for instruction in self._program:
                self._do(instruction, backwards_left)
            self._transfers.finish()
        last.module.targets = []
        self._inputs = []
        if weight is None:
            return []
        together = torch.stack(self._losses)
        self._losses = []
        weight = weight.to(together).reshape(-1, *[1] * (together.ndim - 1))
        return list((together * weight).unbind())

    def _do(self, instruction: Instruction, backwards_left: Counter[int]) -> None:
        stage, micro_batch = self._stage_at[instruction.stage], instruction.micro_batch
        match instruction.do, instruction.kind:
            case "run", "F":
                self._forward(stage, micro_batch)
            case "run", kind:
                backwards_left[stage.index] -= 1
                run = self._weight_backward if kind == "W" else self._backward
                is_last = not backwards_left[stage.index]
                with self._as_last(stage, kind, micro_batch) if is_last else nullcontext():
                    run(stage, Message(kind, stage.index, micro_batch))
            case "receive", kind:
                message = Message(kind, stage.index, micro_batch)
                # A forward receives the boundary tensors, a backward their gradients.
                shapes = stage.received if kind == "F" else _carrying(stage.sent)
                self._transfers.post(message, shapes, self._rank_of(self._source(message)))
            case "send", "F":
                message = Message("F", stage.index, micro_batch)
                outputs = self._in_flight[stage.index, micro_batch].outputs
                self._transfers.send_output(message, outputs, self._rank_of(self._target(message)))
            case "send", _:
                message = Message("B", stage.index, micro_batch)
                gradients, shapes = self._gradients.pop((stage.index, micro_batch)), _carrying(stage.received)
                self._transfers.send_gradient(gradients, shapes, self._rank_of(self._target(message)))

    def _as_last(self, stage: EngineStage, kind: Letter, micro_batch: int) -> AbstractContextManager[object]:
        is_deferred = kind == "W"
        return stage.last_backward(additions_of(self._deferred[stage.index, micro_batch]) if is_deferred else None)

    def _forward(self, stage: EngineStage, micro_batch: int) -> None:
        message = Message("F", stage.index, micro_batch)
        inputs = self._inputs[micro_batch] if stage.index == 0 else self._wait_for(message)
        for tensor, shape in zip(inputs, stage.received, strict=True):
            if stage.index > 0:
                tensor.requires_grad_(shape.requires_grad)
        vars(stage.module)["micro_batch"] = micro_batch  # a module's own `__setattr__` takes 5 us
        self._at(message)
        is_split = (stage.index, micro_batch) in self._split_backwards
        # Recomputation in backward enables autocast again; the rest of backward runs without it.
        with layers_in(self._precision, self._device), self._split.splitting() if is_split else nullcontext():
            result = stage.timer("forward", lambda: stage.module(*inputs), micro_batch=micro_batch)
        if self._check_nan:
            check_output(result, self._position)
        outputs = result if isinstance(result, tuple) else (result,)
        self._in_flight[stage.index, micro_batch] = _InFlight(inputs, outputs)
        target = self._target(message)
        if target is None:
            # Kept until the end of the step, without its graph, which refers to the received input.
            self._losses[micro_batch] = outputs[0].detach()
        elif self._is_here(target):
            self._transfers.hand_over(Message("F", target, micro_batch), tuple(x.detach() for x in outputs))
        else:
            self._at(message, waits_for=target)

    def _backward(self, stage: EngineStage, message: Message) -> None:
        """Run B or I."""
        at = stage.index, message.micro_batch
        is_last = stage.index == self._num_stages - 1
        gradients = () if is_last else self._wait_for(message)
        inputs, outputs = self._in_flight.pop(at)
        if is_last:
            # The weight of the loss is its gradient, not a factor: one operator less in forward and in backward.
            (loss,) = outputs
            gradients = (self._loss_gradients[message.micro_batch].to(loss.dtype).reshape(loss.shape),)
        else:
            outputs = tuple(x for x, shape in zip(outputs, stage.sent, strict=True) if shape.requires_grad)
        self._at(message)
        label = KINDS[message.kind].label
        stage.timer(label, lambda: self._run_backward(at, outputs, gradients), micro_batch=message.micro_batch)
        self._transfers.release_output(Message("F", *at))
        target = self._target(message)
        if target is None:
            return
        gradients = tuple(
            _gradient_of(x) for x, shape in zip(inputs, stage.received, strict=True) if shape.requires_grad
        )
        if self._is_here(target):
            self._transfers.hand_over(Message("B", target, message.micro_batch), gradients)
        else:
            self._gradients[at] = gradients
            self._at(message, waits_for=target)

    def _weight_backward(self, stage: EngineStage, message: Message) -> None:
        """Run W."""
        self._at(message)
        deferred = self._deferred.pop((stage.index, message.micro_batch))
        work = partial(self._split.backward_weight, deferred)
        stage.timer(KINDS[message.kind].label, work, micro_batch=message.micro_batch)

    def _run_backward(self, at: tuple[int, int], outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run autograd for B or I: add gradients to leaves, except for deferred weight gradients."""
        # Outputs that depend on no trained parameter have no graph and need no backward.
        pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad]
        with_graph, of_these = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        if at in self._split_backwards:
            self._deferred[at] = self._split.backward_input(with_graph, of_these) if pairs else []
        elif pairs:
            torch.autograd.backward(with_graph, of_these)

    def _wait_for(self, message: Message) -> tuple[Tensor, ...]:
        """Wait for a message and return its tensors."""
        self._at(message, waits_for=self._source(message))
        flow = KINDS[message.kind].flow
        assert flow is not None  # W receives nothing
        return self._transfers.take(message._replace(kind=flow))

    def _source(self, message: Message) -> int | None:
        return message_from(message.kind, message.stage, self._num_stages)

    def _target(self, message: Message) -> int | None:
        return message_to(message.kind, message.stage, self._num_stages)

    def _rank_of(self, stage: int | None) -> int:
        assert stage is not None  # the program has no transfers at the ends of the chain
        return self._ranks[self._devices[stage]]

    def _is_here(self, stage: int) -> bool:
        return self._devices[stage] == self._device_index

    def _at(self, message: Message, *, waits_for: int | None = None) -> None:
        self._position.at(_in_words(message.kind, message.micro_batch), stage=message.stage, waits_for=waits_for)


def _carrying(shapes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the shapes of tensors that carry a gradient: no gradients are sent for others."""
    return tuple(shape for shape in shapes if shape.requires_grad)


def _gradient_of(tensor: Tensor) -> Tensor:
    """Remove and return the gradient of a received tensor; zeros if it has none."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if gradient is None else gradient


@cache
def _in_words(kind: Letter, micro_batch: int) -> str:
    return f"{KINDS[kind].label} of micro-batch {micro_batch}"
