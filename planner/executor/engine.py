"""The one module that touches `torch.distributed.pipelining`, whose interface moves between releases.

What is added to torch 2.13's `PipelineStage`: receive buffers exist from receiving to the end of that micro-batch's
backward (the engine makes one per micro-batch and direction at the start and never lets go), shapes are given and
never inferred (inference would run later stages on uninitialised memory), the module learns which micro-batch it
runs, and every forward and backward is timed. Under 1F1B what was sent and received is let go of as soon as it can be.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._utils import _make_tensor_from_meta

from planner.core.plan import Schedule
from planner.core.precision import Precision
from planner.executor.stage_module import StageModule
from planner.model.autocast import keeping_casts, layers_in

__all__ = ["Engine"]

Timer = Callable[[str, Callable[[], Any]], Any]
"""Runs a piece of work of the given kind ("forward" or "backward") and notes how long it took."""


class Engine:
    """One stage under its schedule; `group` holds the processes of the pipeline, by default all there are."""

    def __init__(
        self,
        module: StageModule,
        *,
        index: int,
        num_stages: int,
        device: torch.device,
        received: tuple[Tensor, ...],
        sent: tuple[Tensor, ...],
        schedule: Schedule,
        micro_batches: int,
        timer: Timer,
        group: ProcessGroup | None = None,
        precision: Precision = "",
    ) -> None:
        kind = _Stage if schedule == "gpipe" else _EagerStage
        stage = kind(module, index, num_stages, device, input_args=received, output_args=sent, group=group)
        stage.timer = timer
        stage.precision = self._precision = precision
        self._module = module
        self._device = device
        self.micro_batches = micro_batches
        self.loss_scale = 1.0
        loop = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        # The module's output on the last stage is the loss already, and what each counts for is given with each step.
        self._schedule = loop(stage, max(micro_batches, num_stages), loss_fn=self._scaled, scale_grads=False)
        # A smaller mini-batch has fewer micro-batches than stages: the loops run it, their constructor refuses it.
        self._schedule._n_microbatches = micro_batches

    def step(
        self, tensors: Sequence[Tensor], targets: Sequence[Any], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Forward and backward of a mini-batch; gradients are added to those in the parameters.

        Args:
            tensors: First stage: the model's input tensors, mini-batch first. Else empty.
            targets: Last stage: the targets of every micro-batch. Else empty.
            weights: Last stage: what the loss of every micro-batch is multiplied with; by default 1/M.

        Returns:
            Last stage: the loss of every micro-batch times its weight, detached. Else empty. Gradients are those of
            these times `loss_scale`.
        """
        self._module.targets = list(targets)
        self._module.micro_batches = self.micro_batches
        losses: list[Tensor] = []
        # The engine cuts a target into micro-batches and hands them to the loss; ours travel with the module.
        weight = torch.full((self.micro_batches,), 1 / self.micro_batches, dtype=torch.float64)
        if weights:
            weight = torch.tensor(weights, dtype=torch.float64)
        with keeping_casts(self._precision, self._device):
            self._schedule.step(*tensors, target=weight, losses=losses, return_outputs=False)
        self._module.targets = []
        return [loss.detach() / self.loss_scale for loss in losses]

    def _scaled(self, loss: Tensor, weight: Tensor) -> Tensor:
        return loss * (float(weight) * self.loss_scale)


class _Stage(PipelineStage):
    timer: Timer
    precision: Precision

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id  # type: ignore[assignment]
        run = super().forward_one_chunk
        # Recomputation in backward switches autocast on again by itself; the rest of backward runs without.
        with layers_in(self.precision, self.device):
            return self.timer("forward", lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().backward_one_chunk
        self.timer("backward", lambda: run(bwd_chunk_id, *args, **kwargs))
        loss = kwargs.get("loss")
        if loss is not None:
            # The schedule keeps it to the end of the step, and with it what its graph leads to: the received input.
            loss.detach_()
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._provide(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._provide(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        _release(self.args_recv_info)
        return prepared

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        _release(self.grad_recv_info)
        return prepared

    def _provide(self, infos: Any) -> None:
        for info in infos:
            if info.buffer is None and info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)


class _EagerStage(_Stage):
    """For 1F1B, whose loop in torch keeps in its variables what it sent and received long after that is over.

    Handles of sends hold the tensor over gloo. Those of the last output but one of the warm-up (`send_work`) stay until
    the cool-down, beside all that is in flight by then; `bwd_recvs` and `bwd_sends` stay through the next forward, and
    the latter through the next backward too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outputs_sent: dict[int, list[Tensor]] = {}
        self._gradients_sent: list[torch.distributed.P2POp] = []
        self._gradients_received: list[torch.distributed.P2POp] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # The loop has waited for them together with the input of this forward.
        self._gradients_sent.clear()
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._gradients_received.clear()
        # The loop has waited for this send before it received the gradient. Nobody but its handle, which is out of
        # reach, still has the tensor: it is our own alias of the output.
        for tensor in self._outputs_sent.pop(bwd_chunk_id, ()):
            tensor.data = tensor.new_empty(0)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        ops: list[torch.distributed.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()
        self._outputs_sent[fwd_chunk_id] = [op.tensor for op in ops]
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self._gradients_received = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._gradients_received

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        self._gradients_sent = super().get_bwd_send_ops(bwd_chunk_id)
        return self._gradients_sent


def _release(received: dict[int, Any]) -> None:
    for infos in received.values():
        for info in infos:
            info.buffer = None
