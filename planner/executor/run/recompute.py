"""Recompute a layer: its activations are released after the forward, and computed again in the backward.

As in `torch.utils.checkpoint` with `use_reentrant=True`, the forward runs without a graph. The backward runs it again
with a graph, and then a backward through this graph. Three differences ensure that a recomputed layer needs no more
memory than a layer that keeps its activations:

- The layer's outputs and their gradients are released as soon as the backward has used them. Torch keeps them until the
  end of the backward.
- The state of the random generators, 5 kB, is not stored: every run of the layer seeds them first (see `random_state`).
- Outputs that require no gradient do not get a gradient of zeros.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.executor.run.parts import extract_tensors
from planner.model.autocast import caching_only_with_graph

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class RecomputedLayer:
    """Properties of a recomputed layer that must be known before the layer runs."""

    copies_input: bool
    """True if the layer must copy its input tensors, because this layer or a later layer writes into them."""
    carries: tuple[bool, ...]
    """True for each output tensor that requires a gradient."""


def run_recomputed(run: Callable[[Any], Any], layer: RecomputedLayer, value: Any) -> Any:
    """Return `run(value)`. Until the backward, only `value` is kept; the backward calls `run` again.

    Args:
        run: Function that computes the layer's output from its input, both nested values. It must compute the same
            output each time.
        layer: Properties of the layer.
        value: Input of the layer.
    """
    received, rebuild = extract_tensors(value)
    # Without a backward there is nothing to recompute.
    if not any(layer.carries) or not torch.is_grad_enabled():
        return run(rebuild([tensor.clone() for tensor in received]) if layer.copies_input else value)
    # The function takes and returns flat tensors; the structure of its results is stored as it runs.
    structure: list[Callable[[Sequence[Tensor]], Any]] = []

    def run_tensors(*tensors: Tensor) -> Tensors:
        if layer.copies_input:
            tensors = tuple(tensor.clone() for tensor in tensors)
        results, rebuild_results = extract_tensors(run(rebuild(tensors)))
        structure.append(rebuild_results)
        return tuple(results)

    # The anchor requires a gradient, so that the outputs do, even if no input of the layer requires one.
    anchor = torch.zeros((), requires_grad=True)
    results: Tensors = _Recomputing.apply(run_tensors, layer.carries, anchor, *received)  # type: ignore[no-untyped-call]
    # Autograd holds the arguments of a backward until its end, but releases those of a hook before it.
    node: Any = next(result.grad_fn for result in results if result.grad_fn is not None)
    node.register_prehook(partial(_take_gradients, node.arrived))
    return structure[0](results)


class _Recomputing(torch.autograd.Function):
    """Recomputed layer. The forward builds no graph; the backward runs the layer again and builds the graph."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensors], carries: tuple[bool, ...], _anchor: Tensor, *tensors: Tensor
    ) -> Tensors:
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
        ctx.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        ctx.run = run
        ctx.arrived = []  # gradients of its outputs that were not used yet
        ctx.save_for_backward(*tensors)
        # Without this, autograd would create gradients of zeros for unused outputs, which are as large as the outputs.
        ctx.set_materialize_grads(False)
        # Results become differentiable. They must be neither views, which later layers could not write into, nor
        # parameters or buffers that the layer returns.
        with caching_only_with_graph():
            results = tuple(tensor.detach() for tensor in run(*tensors))
        ctx.mark_non_differentiable(*(tensor for tensor, carry in zip(results, carries, strict=True) if not carry))
        return results

    @staticmethod
    def backward(ctx: Any, *_released: None) -> Any:
        # The inputs become leaves, so that the graph of this run ends at them.
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with ExitStack() as stack:
            # Restore the autocast state of the forward, because the engine runs backwards without autocast.
            for kind, enabled, dtype in ctx.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            stack.enter_context(torch.enable_grad())
            # Pass views, because autocast would keep a low-precision copy of a leaf until the end of the step.
            results = ctx.run(*(tensor.view_as(tensor) for tensor in inputs))
            pairs = [(t, gradient) for t, gradient in zip(results, ctx.arrived, strict=True) if t.requires_grad]
            ctx.arrived.clear()
            # Only `waiting` refers to the gradients, and `_BackwardStart` empties it. Nothing refers to the outputs.
            waiting = [gradient for _, gradient in pairs]
            start: Tensor = _BackwardStart.apply(waiting, *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
            del results, pairs
        # After the block, because this backward must also run without autocast.
        if start.requires_grad:
            start.backward()
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _take_gradients(into: list[Tensor | None], gradients: Tensors) -> tuple[None, ...]:
    """Move `gradients` to the list `into`, and return a None for each, so that autograd keeps no gradient."""
    into.extend(gradients)
    return (None,) * len(gradients)


class _BackwardStart(torch.autograd.Function):
    """Autograd function that starts a backward with the gradients of a list, and empties the list."""

    @staticmethod
    def forward(ctx: Any, waiting: list[Tensor | None], *results: Tensor) -> Tensor:
        # `save_for_backward` would keep the tensors until the end of the backward.
        ctx.waiting = waiting
        return torch.zeros((), device=results[0].device if results else None)

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> Any:
        gradients = (None, *ctx.waiting)
        ctx.waiting.clear()
        return gradients
