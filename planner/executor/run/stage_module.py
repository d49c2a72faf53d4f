"""One stage as a module: its layers under their original names, recomputed where the plan says.

Over a boundary go plain contiguous tensors; tuples and the like are taken apart at one edge and rebuilt at the next.
The last stage runs the loss inside its forward. That keeps logits out of what is in flight when the stage recomputes,
and makes the loss scalar, not the logits, the output that the engine holds for every micro-batch.

Where the plan recomputes single layers, each of them is a checkpoint of its own: its input is kept, and what else it
saves is computed again just before its backward. The last layer of the last stage is one together with the loss.

Before each layer the random generators are seeded for it (`random_state`), so that it draws the same when it runs
again. Running statistics of batch normalisations are left alone until the mini-batch is over (`batch_norm`); other
buffers that a layer writes are, when it runs again, what they were the first time (`replay`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from planner.core.values.plan import Recompute
from planner.executor.run.losses import UNCOUNTED, nothing_of
from planner.executor.run.parts import tensors_of
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.recompute import Recomputed, recomputing
from planner.executor.run.replay import LayerState
from planner.executor.run.shapes import Boundary
from planner.model.autocast import caching_only_with_graph
from planner.model.batch_norm import BatchStatistics
from planner.model.chain import Layer, register
from planner.model.layout import laid_out
from planner.model.regions import without_reentrance
from planner.model.stage import ModelStage


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Modules and all within them in evaluation mode; afterwards each is in the mode that it was in."""
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


class StageModule(nn.Module):
    """Layers of one stage, called by the engine with the tensors of one micro-batch.

    `micro_batch` is set before each forward, and before each step `seeds`, `targets` (the last stage's, of every
    micro-batch), and `micro_batches`, `received` and `sent`, which are others where a mini-batch is smaller than
    planned.

    Args:
        layers: The layers.
        received: What crosses the boundary in front of them.
        sent: What crosses the one behind them, and how it must lie (contiguous without); none on the last stage.
        recompute: On which micro-batches the stage is recomputed as a whole; with `layers`, only `recomputed` is.
        micro_batches: M.
        loss_fn: The loss, on the last stage.
        copies_input: Whether the layers must work on a copy of what is received.
        carries: Which of the tensors behind the stage carry a gradient.
        recomputed: The layers that are recomputed on their own, counted from the stage's first.
        first_layer: Place of the first layer in the whole model's chain.
        statistics: Collects for the batch normalisations of all stages of this process, which may lie in one model.

    Raises:
        ModelError: A layer cannot be trained in micro-batches.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        received: Boundary,
        sent: Boundary | None = None,
        recompute: Recompute,
        micro_batches: int,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        copies_input: bool,
        carries: Sequence[bool] = (),
        recomputed: Mapping[int, Recomputed] | None = None,
        first_layer: int = 0,
        statistics: BatchStatistics | None = None,
    ) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            if isinstance(layer.module, ModelStage):
                layer.module.share_with(self)
                layer.module.keep_state()
                # One for all layers, or one for each.
                layer.module.call_at_layers(partial(self._seed, index))
            else:
                register(self, layer.name, layer.module)
        self._layers = [layer.module for layer in layers]
        self._names = [layer.name for layer in layers]
        self.statistics = statistics or BatchStatistics()
        self.statistics.watch(_named_modules(layers))
        self._first_layer = first_layer
        self._running = 0
        self.seeds = StepSeeds(0, 0)
        self.received, self.sent = received, sent
        self._recompute = recompute
        self.micro_batches = micro_batches
        self._loss_fn = loss_fn
        self._copies_input = copies_input
        self._carries = tuple(carries)
        self._recomputed = dict(recomputed or {})
        self._state = LayerState((layer.name, layer.module) for layer in layers)
        self._states = {n: LayerState([(layers[n].name, layers[n].module)]) for n in self._recomputed}
        self._opened = [
            LayerState([(layer.name, layer.module)], only=layer.module.begun)
            for layer in layers[1:]
            if isinstance(layer.module, ModelStage)
        ]
        """By layer but the first: state of the code that runs once more, before and within that layer."""
        self.micro_batch = 0
        self.targets: list[Any] = []
        self.seen: Callable[[int, Any], None] | None = None
        """On the last stage, is given every micro-batch's output, as the loss function gets it."""
        self.timed_again: Callable[[Callable[[], Any]], Any] = _called
        """Calls what may be recomputation, and notes how long that took."""

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors behind this stage, dense; the loss on the last stage."""
        with self.statistics.collecting():
            return self._forward(*tensors)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers of today: a layer may have put another tensor in a buffer's place."""
        parts = [layer for layer in self._layers if isinstance(layer, ModelStage)]
        for part in parts:
            part.share_with(self)
        yield from super().named_buffers(prefix, *args, **kwargs)
        for name, buffer in (each for part in parts for each in part.replaced_buffers()):
            yield f"{prefix}.{name}" if prefix else name, buffer

    def finished_modules(self) -> dict[str, nn.Module]:
        """Return the modules whose forward ends in this stage, by their paths in the whole model."""
        finished: dict[str, nn.Module] = {}
        for name, layer in zip(self._names, self._layers, strict=True):
            finished |= layer.finished if isinstance(layer, ModelStage) else dict(layer.named_modules(prefix=name))
        return finished

    def forget_state(self) -> None:
        """Lets go of what recomputation remembers, once no micro-batch's is left to come."""
        for state in (self._state, *self._states.values(), *self._opened):
            state.forget()

    def evaluating(self) -> AbstractContextManager[None]:
        """Every module that it runs in evaluation mode; see `evaluating`."""
        return evaluating(*(_model_of(layer) for layer in self._layers))

    def _forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        targets = self.targets[self.micro_batch] if self._loss_fn is not None else None
        if not self._recomputes(self.micro_batch) or not self._has_backward(tensors):
            return self._run(None, self.micro_batch, targets, *tensors)
        # The re-entrant kind computes without a graph first, and calls no hook for every tensor that is saved. It
        # wants an input that requires a gradient, which the first stage does not have.
        anchor = torch.zeros((), requires_grad=True)
        arguments = (anchor, self.micro_batch, targets, *tensors)
        timed = self._timed(self._state.replaying(self._run))

        carries, others = self._carries, list[Tensor]()
        splits = any(carries) and not all(carries)

        def run(*given: Any) -> Any:
            with caching_only_with_graph():
                result = timed(*given)
            if not splits:
                return result
            if not torch.is_grad_enabled():
                others.extend(t for t, does in zip(result, carries, strict=True) if not does)
            return tuple(t for t, does in zip(result, carries, strict=True) if does)

        result: Tensor | tuple[Tensor, ...] = checkpoint(run, *arguments, use_reentrant=True, preserve_rng_state=False)
        if isinstance(result, Tensor) or not carries:
            return result
        if not splits:
            return result if all(carries) else tuple(t.detach() for t in result)
        # This kind makes zeros as the gradient of all that it returns, so what carries none (a mask) is left out.
        merged = {True: iter(result), False: iter([t.detach() for t in others])}
        others.clear()
        return tuple(next(merged[does]) for does in carries)

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, which is called again in backward, noting the time of that."""
        return lambda *arguments: self.timed_again(lambda: run(*arguments))

    def _has_backward(self, tensors: Sequence[Tensor]) -> bool:
        carrying = any(t.requires_grad for t in (*tensors, *self.parameters()))
        return carrying and torch.is_grad_enabled()

    def _recomputes(self, micro_batch: int) -> bool:
        if self._recompute == "except-last":
            return micro_batch < self.micro_batches - 1
        return self._recompute == "always"

    def _run(
        self, _anchor: Tensor | None, micro_batch: int, targets: Any, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        if self._copies_input:
            # Received tensors are leaves, and inside a recomputed stage they are read twice: neither may be written.
            tensors = tuple(tensor.clone() for tensor in tensors)
        else:
            # Views: of a leaf, as received ones are, autocast would keep a copy until the end of the step.
            tensors = tuple(tensor.view_as(tensor) for tensor in tensors)
        # No reference to what lies between two layers is kept.
        value = self.received.rebuild(tensors)
        last = len(self._layers) - 1
        moments = [opened.moment() for opened in self._opened]
        for index in range(last + 1):
            if index and moments:
                # Code that several layers run from its start changes its state once per micro-batch.
                self._opened[index - 1].return_to(moments[index - 1])
            run: Callable[[Any], Any] = partial(self._run_layer, index, micro_batch)
            again = self._recomputed.get(index)
            if again is None:
                value = run(value)
                continue
            is_all = index == last and self._loss_fn is not None
            run = self._states[index].replaying(partial(self._loss_of, run, targets) if is_all else run)
            value = recomputing(self._timed(run), again, value)
            if is_all:
                loss: Tensor = value
                return loss
        if self._loss_fn is not None:
            return self._loss(value, targets)
        leaves, spec = tree_flatten(value)
        outputs = tensors_of(leaves)
        if self.sent is None:
            return tuple(tensor.contiguous() for tensor in outputs)
        self.sent.expect(leaves, spec, tensors)
        return tuple(laid_out(tensor, shape) for tensor, shape in zip(outputs, self.sent.tensors, strict=True))

    def _run_layer(self, index: int, micro_batch: int, value: Any) -> Any:
        vars(self)["_running"] = micro_batch  # a module's own `__setattr__` takes 5 us
        self._seed(index)
        with without_reentrance():
            return self._layers[index](value)

    def _loss_of(self, run: Callable[[Any], Any], targets: Any, value: Any) -> Tensor:
        return self._loss(run(value), targets)

    def _loss(self, output: Any, targets: Any) -> Tensor:
        assert self._loss_fn is not None
        if self.seen is not None:
            self.seen(self.micro_batch, output)
        return nothing_of(output) if targets is UNCOUNTED else self._loss_fn(output, targets)

    def _seed(self, index: int, further: int = 0) -> None:
        self.seeds.plant(self._first_layer + index + further, self._running)


def _called(work: Callable[[], Any]) -> Any:
    return work()


def _named_modules(layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """What the layers run; of a model that is no Sequential, all there is."""
    for layer in layers:
        prefix = "" if isinstance(layer.module, ModelStage) else layer.name
        yield from _model_of(layer.module).named_modules(prefix=prefix)


def _model_of(layer: nn.Module) -> nn.Module:
    return layer.model if isinstance(layer, ModelStage) else layer
