"""Run a schedule's instructions: forwards, backwards and transfers, over `torch.distributed` and autograd.

    for every instruction of this device (`planner.core.schedule.instruction_lists`):
        receive   post a buffer before it is needed, so that the transfer overlaps with computation
        run F     take the input, run the module, keep input and output until the backward
        run B     take the output's gradient, run autograd, keep the input's gradient until it is sent
        run I     as B, but instead of weight gradients keep their operands (`planner.model.split_backward`)
        run W     compute the weight gradients from these operands
        send      begin to send the result of an F, B or I

Tensors of stage s and micro-batch m, from the instruction that stores them to the one that releases them:

    name                 stored by       released by
    _inputs[m]           step            end of step            model input, first stage only
    _in_flight[s, m]     F               B or I                 input and output of the stage
    _deferred[s, m]      I               W                      operands of deferred weight gradients
    _gradients[s, m]     B or I          send                   gradient of the stage's input
    _losses[m]           F               end of step            last stage only

All other devices get the loss of the step from the last stage, together with gradients (`_messages_with_loss`).

The planner computes costs from the same instruction lists. This module has no code for particular schedules.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from planner.core.errors import ModelError
from planner.core.schedule import (
    KINDS,
    Action,
    Instruction,
    Label,
    Schedule,
    devices_of,
    instruction_lists,
    receiving_stage,
    sending_stage,
)
from planner.core.values.precision import Precision
from planner.executor.run.gradients import check_gradient_has_values, check_output_is_finite
from planner.executor.run.losses import sum_losses
from planner.executor.run.replicas import is_replica_hook
from planner.executor.run.stage_module import StageModule
from planner.executor.run.transfers import MessageKey, Transfers
from planner.executor.watch.activity import RankActivity
from planner.model.autocast import forward_context, weight_cast_cache
from planner.model.process_group import hide_process_group
from planner.model.split_backward import DeferredUses, SplitBackward, count_additions

_LOSS: Final = torch.empty((), dtype=torch.float64, device="meta")
"""Meta tensor with the shape and data type of a loss that is sent to another rank."""


class ActionTimer(Protocol):
    """Function that runs one action of a micro-batch and records its time."""

    def __call__(self, kind: Label, work: Callable[[], Any], *, micro_batch: int) -> Any:
        """Call `work`, record its time as an action of kind `kind`, and return its result."""


@dataclass(frozen=True, kw_only=True)
class EngineStage:
    """Stage that this process runs, with its boundary tensors."""

    module: StageModule
    index: int
    """Index in the pipeline."""
    received: tuple[Tensor, ...]
    """Tensors from the previous stage, or the model's input; on the meta device."""
    sent: tuple[Tensor, ...]
    """Tensors for the next stage, or the loss; on the meta device."""
    timer: ActionTimer
    send_during_last_backward: Callable[[Mapping[nn.Parameter, int] | None], AbstractContextManager[object]] = (
        nullcontext
    )
    """Function that returns a context manager for the stage's last backward (B or W) in a step.

    Its argument is the number of additions to each gradient in this backward; None if unknown."""


class _StageAction(NamedTuple):
    stage: EngineStage
    message: MessageKey
    activity: str
    """Name of this action in messages of the failure watch."""
    source: int | None
    """Stage whose message this action needs, if any."""
    target: int | None
    """Stage that needs this action's result, if any."""
    is_split: bool
    """True if the micro-batch's backward on this stage is split into I and W."""
    is_last: bool
    """True for the last backward (B or W) of the stage in a step."""
    receives_loss: bool
    """True if the loss of the step arrives with the gradients that this action needs."""


class _InFlight(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Engine:
    """Loop over a schedule's instructions for the stages of one process.

    Args:
        stages: Stages of this process, in pipeline order.
        num_stages: Number of stages of the whole pipeline.
        ranks: Ranks of the pipeline, in the order of its devices.
        device: Device of the stages.
        schedule: Schedule, which defines the order of forwards and backwards.
        micro_batches: Number of micro-batches (M).
        group: Processes of the pipeline; by default all processes.
        precision: Precision of the layers.
        activity: Activity of this process, for error messages.
        check_nan: If true, check that every output is finite. Each check waits for the device.
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
        activity: RankActivity | None = None,
        check_nan: bool = False,
    ) -> None:
        self.micro_batches = micro_batches
        self.loss_scale = 1.0
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of the weighted losses of the last step, equal on all ranks of the pipeline."""
        self._stages = list(stages)
        self._num_stages, self._ranks = num_stages, ranks
        self._device, self._precision = device, precision
        self._activity, self._check_nan = activity or RankActivity(), check_nan
        num_devices = len(ranks)
        order = [schedule.order(d, num_devices, micro_batches, len(stages)) for d in range(num_devices)]
        self._devices = devices_of(order)
        self._device_index = self._devices[stages[0].index]
        self._stage_at = {stage.index: stage for stage in stages}
        self._split = SplitBackward(ignores_gradient=is_replica_hook)
        own = {stage.index: stage.module.finished_modules().values() for stage in stages}
        self._splitting = {index: self._split.splitting(*modules) for index, modules in own.items()}
        self._deferred: dict[tuple[int, int], DeferredUses] = {}
        """Operands of deferred weight gradients, between the input-gradient and the weight-gradient pass."""
        self._transfers = Transfers(device, group)
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._gradients: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """Gradient of a stage's input for a micro-batch, until it is sent."""
        self._with_gradient: set[int] = set()
        """Stages that have computed a gradient for the previous stage in this step."""
        self._inputs: list[tuple[Tensor, ...]] = []
        """Input tensors of the model, of every micro-batch."""
        self._losses: list[Tensor] = []
        self._loss_weights = torch.empty(0)
        self._messages_with_loss = _messages_with_loss(order)
        self._loss_gradients: Sequence[Tensor] = ()
        self._instructions = self._bind_instructions(instruction_lists(order)[self._device_index])

    def step(
        self, tensors: Sequence[Tensor], targets: Sequence[Any], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Run forward and backward of a mini-batch, and add its gradients to existing gradients.

        The added gradients are multiplied by the attribute `loss_scale`.

        Args:
            tensors: On the first stage, input tensors of the model with the mini-batch as first dimension; elsewhere
                empty.
            targets: On the last stage, targets of every micro-batch; elsewhere empty.
            weights: On the last stage, factor of every micro-batch's loss; by default 1/M.

        Returns:
            On the last stage, the weighted loss of every micro-batch, detached; elsewhere an empty list.
        """
        last = self._stages[-1]
        last.module.targets = list(targets)
        for stage in self._stages:
            stage.module.micro_batches = self.micro_batches
        has_loss = last.index == self._num_stages - 1
        if has_loss:
            weights = weights or [1 / self.micro_batches] * self.micro_batches
            self._loss_weights = torch.tensor(weights, dtype=torch.float64)
            self._loss_gradients = (self._loss_weights * self.loss_scale).to(self._device).unbind()
        self._inputs = list(zip(*(tensor.tensor_split(self.micro_batches) for tensor in tensors), strict=True))
        self._losses = [torch.empty(0)] * self.micro_batches
        self._with_gradient.clear()
        with weight_cast_cache(self._precision, self._device), self._split.weight_cast_cache():
            for run in self._instructions:
                run()
            self._transfers.wait_until_sent()
        last.module.targets = []
        self._inputs = []
        losses = self._weigh_losses() if has_loss else []
        self._losses = []
        return losses

    def check_gradients_sent(self) -> None:
        """Check that each stage has computed a gradient for the previous stage in the last step.

        A stage without such a gradient sends zeros. In a plain loop, parameters of earlier stages would have no
        gradients. With gradients of zeros, an optimizer may change these parameters.

        Raises:
            ModelError: A stage has computed no gradient for the previous stage, so it has sent only zeros.
        """
        for stage in self._stages:
            if stage.index in self._with_gradient or not _tensors_with_gradient(stage.received) or not stage.index:
                continue
            raise ModelError(
                f"in this step, no gradient reaches the stages before stage {stage.index}: in a plain loop, their "
                "parameters would have no gradients; here they get zeros, and an optimizer may change them",
                hint="if a layer detaches its input in some steps only, train these steps in a run of their own, with "
                "another `--set` value, profile and plan, and load the weights with `--weights`",
            )

    def _weigh_losses(self) -> list[Tensor]:
        """Return the weighted losses of all micro-batches, and store their sum."""
        together = torch.stack(self._losses)
        weights = self._loss_weights.to(together).reshape(-1, *[1] * (together.ndim - 1))
        losses = list((together * weights).unbind())
        self.loss = torch.as_tensor(sum_losses(losses), dtype=torch.float64)
        return losses

    def _bind_instructions(self, program: Sequence[Instruction]) -> list[Callable[[], None]]:
        # Values that are equal in all steps are computed here, once.
        runs = [x for x in program if x.do == "run"]
        last = {x.stage: x for x in runs if KINDS[x.kind].follows is not None}
        split = {(x.stage, x.micro_batch) for x in runs if x.kind == "I"}
        return [
            self._run_of(x, is_split=(x.stage, x.micro_batch) in split, is_last=x is last.get(x.stage))
            if x.do == "run"
            else self._transfer_of(x)
            for x in program
        ]

    def _run_of(self, instruction: Instruction, *, is_split: bool, is_last: bool) -> Callable[[], None]:
        kind, stage, micro_batch = instruction.kind, instruction.stage, instruction.micro_batch
        action = _StageAction(
            stage=self._stage_at[stage],
            message=MessageKey(kind, stage, micro_batch),
            activity=f"{KINDS[kind].label} of micro-batch {micro_batch}",
            source=sending_stage(kind, stage, self._num_stages),
            target=receiving_stage(kind, stage, self._num_stages),
            is_split=is_split,
            is_last=is_last,
            receives_loss=KINDS[kind].direction < 0 and (stage, micro_batch) in self._messages_with_loss,
        )
        return partial(self._forward if kind == "F" else self._backward, action)

    def _transfer_of(self, instruction: Instruction) -> Callable[[], None]:
        kind, stage = instruction.kind, self._stage_at[instruction.stage]
        message = MessageKey(kind, stage.index, instruction.micro_batch)
        other = (sending_stage if instruction.do == "receive" else receiving_stage)(kind, stage.index, self._num_stages)
        assert other is not None  # the program has no transfers at the ends of the chain
        rank = self._ranks[self._devices[other]]
        if instruction.do == "receive":
            # A forward receives the boundary tensors, a backward their gradients.
            shapes = stage.received if kind == "F" else _tensors_with_gradient(stage.sent)
            if kind == "B" and (stage.index, message.micro_batch) in self._messages_with_loss:
                shapes = (*shapes, _LOSS)
            return partial(self._transfers.post, message, shapes, rank)
        if kind == "F":
            return partial(self._send_output, message, rank)
        send = (
            self._send_gradient_and_loss
            if (other, message.micro_batch) in self._messages_with_loss
            else self._send_gradient
        )
        return partial(send, message, _tensors_with_gradient(stage.received), rank)

    def _send_output(self, message: MessageKey, rank: int) -> None:
        self._transfers.send_output(message, self._in_flight[message[1:]].outputs, rank)

    def _send_gradient(self, message: MessageKey, shapes: Sequence[Tensor], rank: int) -> None:
        self._transfers.send_gradient(self._gradients.pop(message[1:]), shapes, rank)

    def _send_gradient_and_loss(self, message: MessageKey, shapes: Sequence[Tensor], rank: int) -> None:
        if message.stage == self._num_stages - 1:
            self._weigh_losses()
        self._transfers.send_gradient((*self._gradients.pop(message[1:]), self.loss), (*shapes, _LOSS), rank)

    def _forward(self, action: _StageAction) -> None:
        stage, micro_batch = action.stage, action.message.micro_batch
        inputs = self._inputs[micro_batch] if action.source is None else self._wait_for_message(action)
        for tensor, shape in zip(inputs, stage.received, strict=True):
            if action.source is not None:
                tensor.requires_grad_(shape.requires_grad)
        vars(stage.module)["micro_batch"] = micro_batch  # a module's own `__setattr__` takes 5 us
        self._set_activity(action)
        # Autocast is enabled for the forward, and for its recomputation; other parts of the backward run without it.
        with (
            forward_context(self._precision, self._device),
            self._splitting[stage.index] if action.is_split else nullcontext(),
        ):
            result = stage.timer("forward", lambda: stage.module(*inputs), micro_batch=micro_batch)
        if self._check_nan:
            check_output_is_finite(result, self._activity)
        outputs = result if isinstance(result, tuple) else (result,)
        self._in_flight[stage.index, micro_batch] = _InFlight(inputs, outputs)
        if action.target is None:
            # Keep the loss until the end of the step, but not its graph, which refers to the received input.
            self._losses[micro_batch] = outputs[0].detach()
        elif self._is_here(action.target):
            self._transfers.hand_over(MessageKey("F", action.target, micro_batch), tuple(x.detach() for x in outputs))
        else:
            self._set_activity(action, waits_for=action.target)

    def _backward(self, action: _StageAction) -> None:
        # During the last backward of a step, complete gradients may already be summed over replicas.
        run = self._weight_backward if action.message.kind == "W" else self._input_backward
        if not action.is_last:
            run(action)
            return
        deferred = self._deferred[action.message[1:]] if action.message.kind == "W" else None
        with action.stage.send_during_last_backward(None if deferred is None else count_additions(deferred)):
            run(action)

    def _input_backward(self, action: _StageAction) -> None:
        stage, (kind, *_, micro_batch) = action.stage, action.message
        at = stage.index, micro_batch
        is_last_stage = action.source is None
        gradients = () if is_last_stage else self._wait_for_message(action)
        if action.receives_loss:
            gradients, self.loss = gradients[:-1], gradients[-1]
        inputs, outputs = self._in_flight.pop(at)
        if is_last_stage:
            # The weight of the loss is passed as its gradient. A factor would need one more operator in each direction.
            (loss,) = outputs
            gradients = (self._loss_gradients[micro_batch].to(loss.dtype).reshape(loss.shape),)
        else:
            outputs = tuple(x for x, shape in zip(outputs, stage.sent, strict=True) if shape.requires_grad)
        self._set_activity(action)
        work = partial(self._run_backward, action, outputs, gradients)
        stage.timer(KINDS[kind].label, work, micro_batch=micro_batch)
        self._transfers.release_output(MessageKey("F", *at))
        if action.target is None:
            return
        received = [x for x, shape in zip(inputs, stage.received, strict=True) if shape.requires_grad]
        if any(x.grad is not None for x in received):
            self._with_gradient.add(stage.index)
        gradients = tuple(map(_take_gradient, received))
        if self._is_here(action.target):
            self._transfers.hand_over(MessageKey("B", action.target, micro_batch), gradients)
        else:
            self._gradients[at] = gradients
            self._set_activity(action, waits_for=action.target)

    def _weight_backward(self, action: _StageAction) -> None:
        self._set_activity(action)
        work = partial(self._split.backward_weight, self._deferred.pop(action.message[1:]))
        action.stage.timer(KINDS["W"].label, work, micro_batch=action.message.micro_batch)

    def _run_backward(self, action: _StageAction, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        # Outputs that depend on no trained parameter have no graph and need no backward.
        pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad]
        with_graph, of_these = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        with hide_process_group():
            if action.is_split:
                deferred = self._split.backward_input(with_graph, of_these) if pairs else []
                self._deferred[action.message[1:]] = deferred
            elif pairs:
                torch.autograd.backward(with_graph, of_these)

    def _wait_for_message(self, action: _StageAction) -> tuple[Tensor, ...]:
        self._set_activity(action, waits_for=action.source)
        return self._transfers.take(action.message._replace(kind="F" if action.message.kind == "F" else "B"))

    def _is_here(self, stage: int) -> bool:
        return self._devices[stage] == self._device_index

    def _set_activity(self, action: _StageAction, *, waits_for: int | None = None) -> None:
        self._activity.begin(action.activity, stage=action.message.stage, waits_for=waits_for)


def _messages_with_loss(order: Sequence[Sequence[Action]]) -> set[tuple[int, int]]:
    """Return the gradient messages that also contain the loss of the step, as pairs (receiving stage, micro-batch)."""
    # The last K stages are on different devices (K: number of devices). Each of the last K - 1 stages sends the loss to
    # the previous stage with the gradients of its last backward. If backwards are split, the loss arrives before the
    # last weight passes, so a device that is ready early can begin the next step.
    last = {action.stage: action.micro_batch for row in order for action in row if KINDS[action.kind].direction < 0}
    num_stages = len(last)
    return {(stage - 1, last[stage]) for stage in range(num_stages - len(order) + 1, num_stages)}


def _tensors_with_gradient(shapes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(shape for shape in shapes if shape.requires_grad)


def _take_gradient(tensor: Tensor) -> Tensor:
    gradient, tensor.grad = tensor.grad, None
    if gradient is None:
        return torch.zeros_like(tensor)
    check_gradient_has_values(gradient)
    return gradient
