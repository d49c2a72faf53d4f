"""The one module that touches `torch.distributed.pipelining`, whose interface moves between releases.

What is added to torch 2.13's `PipelineStage`: receive buffers exist from receiving to the end of that micro-batch's
backward (the engine makes one per micro-batch and direction at the start and never lets go), shapes are given and
never inferred (inference would run later stages on uninitialised memory), the module learns which micro-batch it
runs, every forward and backward is timed, and what is waited for is noted. Under 1F1B and interleaved 1F1B what was
sent and received is let go of as soon as it can be.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _ComputationType, _wait_batch_p2p

from planner.core.schedule import INTERLEAVED, programs, stage_of
from planner.core.values.plan import Schedule
from planner.core.values.precision import Precision
from planner.executor.run.finite import check_output
from planner.executor.run.stage_module import StageModule
from planner.executor.watch.position import Position
from planner.model.autocast import keeping_casts, layers_in
from planner.model.layout import in_memory_order

__all__ = ["Engine", "EngineStage"]

_LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")


class Timer(Protocol):
    """Runs a forward or backward of a micro-batch and notes how long it took."""

    def __call__(self, kind: Literal["forward", "backward"], work: Callable[[], Any], *, micro_batch: int) -> Any:
        """The result of `work`."""


@dataclass(frozen=True, kw_only=True)
class EngineStage:
    """One of the stages that this process runs."""

    module: StageModule
    index: int
    """Along the chain."""
    received: tuple[Tensor, ...]
    """What comes from the stage before, or the model's input; on the meta device."""
    sent: tuple[Tensor, ...]
    """What goes to the stage behind, or the loss."""
    timer: Timer
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the backward of a step's last micro-batch runs in."""


class Engine:
    """The stages of one process under their schedule.

    Args:
        stages: In the order of the chain; more than one under interleaved 1F1B only.
        num_stages: Of the whole pipeline.
        ranks: The processes of the pipeline, the one with the first stage first: stage s is on `ranks[s % K]`.
        device: Where the stages run.
        schedule: The order of forwards and backwards.
        micro_batches: M.
        group: Holds the processes of the pipeline; by default all there are.
        precision: What the layers run in.
        position: Is told what this process does and waits for.
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
        self._precision = precision
        self._modules = [stage.module for stage in stages]
        self._device = device
        self.micro_batches = micro_batches
        self.loss_scale = 1.0
        kind = {"gpipe": _Stage, "1f1b": _EagerStage, "interleaved": _Stage}[schedule]
        common: dict[str, Any] = {"num_stages": num_stages, "device": device, "ranks": ranks, "group": group}
        common |= {"precision": precision, "position": position or Position(), "check_nan": check_nan}
        parts = [kind(stage, **common) for stage in stages]
        self._last_part = parts[-1]
        # The module's output on the last stage is the loss already. The schedule keeps it to the end of the step: it
        # gets it without its graph, which leads to the received input.
        settings: dict[str, Any] = {"loss_fn": lambda loss, _target: loss.detach(), "scale_grads": False}
        self._schedule: Any
        if schedule == "interleaved":
            self._schedule = _Interleaved(parts, micro_batches, **settings)
        else:
            loop = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
            self._schedule = loop(parts[0], max(micro_batches, num_stages), **settings)
            # A smaller mini-batch has fewer micro-batches than stages: the loops run it, their constructor refuses it.
            self._schedule._n_microbatches = micro_batches

    def step(
        self, tensors: Sequence[Tensor], targets: Sequence[Any], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Forward and backward of a mini-batch; gradients are added to those in the parameters.

        Args:
            tensors: With the first stage: the model's input tensors, mini-batch first. Else empty.
            targets: With the last stage: the targets of every micro-batch. Else empty.
            weights: With the last stage: what the loss of every micro-batch is multiplied with; by default 1/M.

        Returns:
            With the last stage: the loss of every micro-batch times its weight, detached. Else empty. Gradients are
            those of these times `loss_scale`.
        """
        self._modules[-1].targets = list(targets)
        for module in self._modules:
            module.micro_batches = self.micro_batches
        losses: list[Tensor] = []
        weight: Tensor | None = None
        if self._last_part.is_last:
            weight = torch.tensor(weights or [1 / self.micro_batches] * self.micro_batches, dtype=torch.float64)
            self._last_part.loss_gradients = (weight * self.loss_scale).to(self._device).unbind()
        with keeping_casts(self._precision, self._device):
            # The engine cuts a target into micro-batches and hands them to the loss; ours travel with the module.
            self._schedule.step(*tensors, target=weight, losses=losses, return_outputs=False)
        self._modules[-1].targets = []
        if weight is None:
            return []
        together = torch.stack(losses)
        weight = weight.to(together).reshape(-1, *[1] * (together.ndim - 1))
        return list((together * weight).unbind())


class _Stage(PipelineStage):
    def __init__(
        self,
        stage: EngineStage,
        *,
        num_stages: int,
        device: torch.device,
        ranks: Sequence[int],
        group: ProcessGroup | None,
        precision: Precision,
        position: Position,
        check_nan: bool,
    ) -> None:
        given: dict[str, Any] = {"input_args": stage.received, "output_args": stage.sent, "group": group}
        super().__init__(stage.module, stage.index, num_stages, device, **given)
        self.timer = stage.timer
        self._last_backward = stage.last_backward
        self.after_backward: Callable[[int], None] = lambda _micro_batch: None
        self.loss_gradients: Sequence[Tensor] = ()
        """On the last stage, of every micro-batch: what its backward begins with."""
        self.precision: Precision = precision
        self._position = position
        self._check_nan = check_nan
        self._ranks = ranks
        # To the schedules a process is its place in the pipeline, whatever its number in the job.
        self.group_rank = stage.index % len(ranks)

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        return self._ranks[stage_idx % len(self._ranks)]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        vars(self.submod)["micro_batch"] = fwd_chunk_id  # a module's own `__setattr__` takes 5 us
        self._at("forward", fwd_chunk_id)
        run = super().forward_one_chunk
        # Recomputation in backward switches autocast on again by itself; the rest of backward runs without.
        with layers_in(self.precision, self.device):
            result = self.timer("forward", lambda: run(fwd_chunk_id, *args, **kwargs), micro_batch=fwd_chunk_id)
        if self._check_nan:
            check_output(result, self._position)
        if not self.is_last:
            self._at("forward", fwd_chunk_id, waits_for=self.stage_index + 1)
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._at("backward", bwd_chunk_id)
        run = super().backward_one_chunk
        if self.is_last:
            (kwargs["loss"],), _ = self.fwd_cache[bwd_chunk_id]
            self._loss_gradient = self.loss_gradients[bwd_chunk_id]
        with self._last_backward() if kwargs["last_backward"] else nullcontext():
            self.timer("backward", lambda: run(bwd_chunk_id, *args, **kwargs), micro_batch=bwd_chunk_id)
        if not self.is_first:
            self._at("backward", bwd_chunk_id, waits_for=self.stage_index - 1)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None
        self.after_backward(bwd_chunk_id)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_last:
            # What the loss counts for, in place of a factor: one operator less in forward, and one in backward.
            loss = bwd_kwargs["stage_output"]
            bwd_kwargs["output_grads"] = self._loss_gradient.to(loss.dtype).reshape(loss.shape)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._provide(self.args_recv_info[fwd_chunk_id])
        if not self.is_first:
            self._at("forward", fwd_chunk_id, waits_for=self.stage_index - 1)
        return _in_memory_order(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._provide(self.grad_recv_info[bwd_chunk_id])
            self._at("backward", bwd_chunk_id, waits_for=self.stage_index + 1)
        return _in_memory_order(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return _in_memory_order(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        # The gradient of a leaf that is dense lies as the leaf does: autograd sees to that.
        return _in_memory_order(super().get_bwd_send_ops(bwd_chunk_id))

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        _release(self.args_recv_info)
        return prepared

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        _release(self.grad_recv_info)
        return prepared

    def _at(self, kind: str, micro_batch: int, *, waits_for: int | None = None) -> None:
        self._position.at(_named(kind, micro_batch), stage=self.stage_index, waits_for=waits_for)

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

    def __init__(self, stage: EngineStage, **common: Any) -> None:
        super().__init__(stage, **common)
        self._outputs_sent: dict[int, list[Tensor]] = {}
        self._gradients_sent: list[dist.P2POp] = []
        self._gradients_received: list[dist.P2POp] = []

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
        ops: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
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


class _Interleaved(ScheduleInterleaved1F1B):
    """Lets go of what was sent, which torch's loop holds to the end of the step.

    An output goes after its micro-batch's backward: its gradient has come back, so it was delivered long ago. The
    gradient of an input goes when the next one is sent: with one under way, waiting for those before it blocks nobody
    (see `planner.core.schedule.programs`), and holds no step up where M is a multiple of K.
    """

    def __init__(self, stages: list[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(stages, *args, **kwargs)
        self._parts = {stage.stage_index: stage for stage in stages}
        self._outputs_sent: dict[tuple[int, int], tuple[list[Tensor], list[dist.Work]]] = {}
        self._gradients_sent: list[dist.Work] = []
        # Torch's own order has steps that do nothing here, and so other transfers ahead of their need than planned.
        self.pipeline_order_with_comms = _rows(self.pp_group_size, self._n_microbatches, len(stages))
        self._comp_type_to_function_map |= {
            _ComputationType.SEND_F: self._send_outputs,
            _ComputationType.SEND_B: self._send_gradients,
        }
        for stage in stages:
            stage.after_backward = partial(self._let_go_of_output, stage.stage_index)

    def _send_outputs(self, action: Any, _context: Any) -> None:
        ops = self._parts[action.stage_index].get_fwd_send_ops(action.microbatch_index)
        for op in ops:
            op.tensor = op.tensor.detach()
        sent = [op.tensor for op in ops], _batch_p2p(ops)
        self._outputs_sent[action.stage_index, action.microbatch_index] = sent

    def _send_gradients(self, action: Any, _context: Any) -> None:
        ops = self._parts[action.stage_index].get_bwd_send_ops(action.microbatch_index)
        earlier, self._gradients_sent = self._gradients_sent, _batch_p2p(ops)
        _wait_batch_p2p(earlier)

    def _let_go_of_output(self, stage: int, micro_batch: int) -> None:
        tensors, works = self._outputs_sent.pop((stage, micro_batch), ([], []))
        _wait_batch_p2p(works)
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        with _quietly():
            done = super()._step_microbatches(*args, **kwargs)
        _wait_batch_p2p(self._gradients_sent)
        self._gradients_sent = []
        for sent in list(self._outputs_sent):
            self._let_go_of_output(*sent)
        return done


_TYPES = {
    ("run", "F"): _ComputationType.FORWARD,
    ("run", "B"): _ComputationType.FULL_BACKWARD,
    ("send", "F"): _ComputationType.SEND_F,
    ("send", "B"): _ComputationType.SEND_B,
    ("receive", "F"): _ComputationType.RECV_F,
    ("receive", "B"): _ComputationType.RECV_B,
}


def _rows(num_devices: int, micro_batches: int, chunks: int) -> dict[int, list[_Action]]:
    """The planner's instructions for every device, in torch's terms."""
    actions = INTERLEAVED.actions(num_devices, micro_batches, chunks)
    return {
        device: [
            _Action(stage_of(device, what.chunk, num_devices), _TYPES[what.do, what.kind], what.micro_batch)
            for what in row
        ]
        for device, row in enumerate(programs(actions))
    }


def _in_memory_order(ops: list[dist.P2POp]) -> list[dist.P2POp]:
    for op in ops:
        op.tensor = in_memory_order(op.tensor)
    return ops


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's print of the whole schedule where a stage fails: what failed is told by the watch."""
    before, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = before


@cache
def _named(kind: str, micro_batch: int) -> str:
    return f"{kind} of micro-batch {micro_batch}"


def _release(received: dict[int, Any]) -> None:
    for infos in received.values():
        for info in infos:
            info.buffer = None
