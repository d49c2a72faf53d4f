"""Stage as a torch module: its layers under their original names, recomputed as the plan says.

Only plain tensors without gaps in memory are sent. Nested values are flattened before a boundary and rebuilt after it.
The last stage computes the loss in its forward, so a recomputed stage keeps no logits.

If the plan chooses layers to recompute, each of them is recomputed separately, just before its backward. The last layer
of the last stage is recomputed together with the loss.

The random generators are seeded before each layer (`random_state`), so that a recomputation draws the same numbers.
Running statistics of batch normalization are not changed until the end of the mini-batch (`batch_norm`). Other buffers
that a layer writes are set to their previous values for a recomputation (`replay`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from planner.core.errors import UsageError
from planner.core.values.plan import Recompute
from planner.executor.run.losses import UNCOUNTED, zero_loss_of
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.recompute import RecomputedLayer, run_recomputed
from planner.executor.run.replay import LayerState
from planner.executor.run.shapes import Boundary
from planner.model.autocast import caching_only_with_graph
from planner.model.batch_norm import BatchStatistics
from planner.model.calling import copy_containers
from planner.model.chain import Layer, register_at_path
from planner.model.layout import match_layout
from planner.model.process_group import hide_process_group
from planner.model.regions import without_reentrant_checkpointing
from planner.model.stage import ModelStage


@contextmanager
def evaluation_mode(*modules: nn.Module) -> Iterator[None]:
    """Set modules and their submodules to evaluation mode inside the block, and restore their modes afterwards."""
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
    """Layers of one stage as a module, which the engine calls with the tensors of one micro-batch.

    Callers set the attribute `micro_batch` before each forward. Before each step, they set `seeds` and, on the last
    stage, the `targets` of every micro-batch. For a mini-batch that is smaller than planned, they also set
    `micro_batches`, `received` and `sent`.

    Args:
        layers: Layers of the stage.
        received: Boundary before the first layer.
        sent: Boundary after the last layer, with the memory layout of outputs; None for contiguous outputs. The last
            stage ignores `sent`.
        recompute: Recompute choice of the stage. With the choice "layers", only the layers in the argument `recomputed`
            are recomputed.
        micro_batches: Number of micro-batches (M).
        loss_fn: Loss function on the last stage; None on other stages.
        copies_input: True if the layers need a copy of the received tensors, because they write into them.
        carries: True for each tensor at the next boundary that requires a gradient.
        recomputed: Layers that are recomputed separately, by index within the stage.
        first_layer: Index of the stage's first layer in the whole model's chain.
        statistics: Collector of batch normalization statistics for all stages of this process; by default a new one.

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
        recomputed: Mapping[int, RecomputedLayer] | None = None,
        first_layer: int = 0,
        statistics: BatchStatistics | None = None,
    ) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            if isinstance(layer.module, ModelStage):
                layer.module.register_tensors_in(self)
                layer.module.keep_state()
                # There is one `ModelStage` for all layers, or one for each layer.
                layer.module.call_at_layers(partial(self._seed, index))
            else:
                register_at_path(self, layer.name, layer.module)
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
        self._repeated_states = [
            LayerState([(layer.name, layer.module)], only=layer.module.repeated_paths)
            for layer in layers[1:]
            if isinstance(layer.module, ModelStage)
        ]
        """For each layer except the first: state that is restored before the layer runs.

        If a cut is inside a module's `forward`, the layer after the cut runs this `forward` again from its start. The
        module's state is restored first, because it must change only once per micro-batch."""
        self.micro_batch = 0
        self.targets: list[Any] = []
        self.seen: Callable[[int, Any], None] | None = None
        """Function that the last stage calls with the index and the output of every micro-batch."""
        self.timed_recomputation: Callable[[Callable[[], Any]], Any] = lambda work: work()
        """Function that calls the layers, and records the time if the call is a recomputation."""

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the tensors at the next boundary, without gaps in memory; on the last stage, return the loss."""
        with self.statistics.collecting(), hide_process_group():
            return self._forward(*tensors)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and current tensors of all buffers. A layer may have replaced a buffer's tensor."""
        parts = [layer for layer in self._layers if isinstance(layer, ModelStage)]
        for part in parts:
            part.register_tensors_in(self)
        yield from super().named_buffers(prefix, *args, **kwargs)
        for name, buffer in (each for part in parts for each in part.replaced_buffers()):
            yield f"{prefix}.{name}" if prefix else name, buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise an error, because a stage cannot be copied."""
        raise UsageError(
            "a stage cannot be copied (for a moving average of its weights, say)",
            hint="average `pipeline.named_parameters()`, for example with "
            "`AveragedModel(torch.nn.ParameterList(p for _, p in pipeline.named_parameters()))`",
        )

    def finished_modules(self) -> dict[str, nn.Module]:
        """Return the modules whose forward ends in this stage, by their paths in the whole model."""
        finished: dict[str, nn.Module] = {}
        for name, layer in zip(self._names, self._layers, strict=True):
            finished |= (
                layer.finished_modules if isinstance(layer, ModelStage) else dict(layer.named_modules(prefix=name))
            )
        return finished

    def reachable_modules(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield each module that a layer of this stage can reach: path, module, and True if the layer may run it.

        If the model is not a plain `nn.Sequential`, a layer can also reach modules that only other stages run. A module
        that several layers can reach is yielded for each of them.
        """
        for name, layer in zip(self._names, self._layers, strict=True):
            if isinstance(layer, ModelStage):
                running = {*layer.running_paths, *layer.constant_paths}
                yield from ((path, module, path in running) for path, module in layer.model.named_modules())
            else:
                yield from ((path, module, True) for path, module in layer.named_modules(prefix=name))

    def release_snapshots(self) -> None:
        """Release the state that is kept for recomputation. Call this after the last recomputation of a step."""
        for state in (self._state, *self._states.values(), *self._repeated_states):
            state.release_snapshot()

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Return a context manager in which all modules of this stage are in evaluation mode."""
        return evaluation_mode(*(_model_of(layer) for layer in self._layers))

    def _forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self._loss_fn is not None and not self.targets:
            raise UsageError(
                "the script calls a stage, as `update_bn` of `torch.optim.swa_utils` does: stages run only in "
                "`pipeline.step` and `pipeline.evaluate`",
                hint="run such a function with the unpartitioned model and the weights of `gpipe-plan export`",
            )
        targets = self.targets[self.micro_batch] if self._loss_fn is not None else None
        # If no output should have a gradient, the forward runs with a graph, in which `_run` finds one that has.
        is_recomputed = self._recomputes(self.micro_batch) and (any(self._carries) or not self._carries)
        if not is_recomputed or not self._has_backward(tensors):
            return self._run(None, self.micro_batch, targets, *tensors)
        # Re-entrant checkpointing builds no graph in its first forward, and calls no hook for each saved tensor. It
        # needs an input that requires a gradient. The first stage has none, so `anchor` is this input.
        anchor = torch.zeros((), requires_grad=True)
        arguments = (anchor, self.micro_batch, targets, *tensors)
        timed = self._record_second_call(self._state.with_same_state(self._run))

        carries, others = self._carries, list[Tensor]()
        splits = any(carries) and not all(carries)

        def run(*values: Any) -> Any:
            with caching_only_with_graph():
                result = timed(*values)
            if splits:
                if not torch.is_grad_enabled():
                    others.extend(t for t, does in zip(result, carries, strict=True) if not does)
                result = tuple(t for t, does in zip(result, carries, strict=True) if does)
            return _with_graph(result, values[0])

        result: Tensor | tuple[Tensor, ...] = checkpoint(run, *arguments, use_reentrant=True, preserve_rng_state=False)
        if isinstance(result, Tensor) or not carries:
            return result
        if not splits:
            return result if all(carries) else tuple(t.detach() for t in result)
        # Re-entrant checkpointing makes zero gradients for all outputs, so outputs without gradients (masks) bypass it.
        merged = {True: iter(result), False: iter([t.detach() for t in others])}
        others.clear()
        return tuple(next(merged[does]) for does in carries)

    @property
    def receives_gradients(self) -> bool:
        """True if a backward reaches this stage. Otherwise the stage is never recomputed."""
        return self._loss_fn is not None or any(self._carries)

    def _record_second_call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: self.timed_recomputation(lambda: run(*arguments))

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
            # Layers must not write into received tensors: these are leaves, and a recomputed stage reads them twice.
            tensors = tuple(tensor.clone() for tensor in tensors)
        else:
            # Pass views, because autocast would keep a copy of a leaf until the end of the step.
            tensors = tuple(tensor.view_as(tensor) for tensor in tensors)
        # Below, only `value` refers to the tensors between two layers, so that they are released early.
        value = self.received.rebuild(tensors)
        last = len(self._layers) - 1
        snapshots = [state.snapshot() for state in self._repeated_states]
        for index in range(last + 1):
            if index and snapshots:
                # The code that runs again must change its state only once per micro-batch.
                self._repeated_states[index - 1].restore(snapshots[index - 1])
            run: Callable[[Any], Any] = partial(self._run_layer, index, micro_batch)
            again = self._recomputed.get(index)
            if again is None:
                value = run(value)
                continue
            is_all = index == last and self._loss_fn is not None
            run = partial(self._loss_of, run, targets) if is_all else run
            if torch.is_grad_enabled():  # an evaluation is not recomputed
                run = self._states[index].with_same_state(run)
            value = run_recomputed(self._record_second_call(run), again, value)
            if is_all:
                loss: Tensor = value
                return loss
        if self._loss_fn is not None:
            return self._loss(value, targets)
        leaves, spec = tree_flatten(value)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.sent is None:
            return tuple(tensor.contiguous() for tensor in outputs)
        self.sent.check_matches(leaves, spec, tensors)
        return tuple(match_layout(tensor, shape) for tensor, shape in zip(outputs, self.sent.tensors, strict=True))

    def _run_layer(self, index: int, micro_batch: int, value: Any) -> Any:
        vars(self)["_running"] = micro_batch  # a module's own `__setattr__` takes 5 us
        self._seed(index)
        with without_reentrant_checkpointing():
            return self._layers[index](value)

    def _loss_of(self, run: Callable[[Any], Any], targets: Any, value: Any) -> Tensor:
        return self._loss(run(value), targets)

    def _loss(self, output: Any, targets: Any) -> Tensor:
        assert self._loss_fn is not None
        if self.seen is not None:
            self.seen(self.micro_batch, output)
        if targets is UNCOUNTED:
            return zero_loss_of(output)
        return self._loss_fn(output, copy_containers(targets))  # a recomputation calls it again

    def _seed(self, index: int, further: int = 0) -> None:
        self.seeds.seed_generators(self._first_layer + index + further, self._running)


def _with_graph(result: Any, anchor: Tensor) -> Any:
    # `torch.utils.checkpoint` needs an output that requires a gradient. If layers are skipped at random, there may be
    # none. Adding `anchor`, which is zero, makes one.
    outputs = [result] if isinstance(result, Tensor) else list(result)
    if not torch.is_grad_enabled():
        outputs = [output.detach() for output in outputs]
    elif not any(output.requires_grad for output in outputs):
        place = next(n for n, output in enumerate(outputs) if output.is_floating_point())
        outputs[place] = outputs[place] + anchor
    return outputs[0] if isinstance(result, Tensor) else tuple(outputs)


def _named_modules(layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module]]:
    for layer in layers:
        prefix = "" if isinstance(layer.module, ModelStage) else layer.name
        yield from _model_of(layer.module).named_modules(prefix=prefix)


def _model_of(layer: nn.Module) -> nn.Module:
    return layer.model if isinstance(layer, ModelStage) else layer
