"""A layer whose activations are dropped, and computed again in its backward.

As `torch.utils.checkpoint` does it with `use_reentrant=True`: forward without a graph, then, in backward, forward with
one and a backward through it. What differs, so that a recomputed layer needs no more than one that keeps its
activations:

- the layer's outputs and the gradient of its output go as soon as its backward has used them (torch holds both to the
  end of it);
- the state of the random generators, 5 kB, is not kept: what runs seeds them first (see `random_state`);
- outputs that carry no gradient carry none behind the layer either.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.executor.run.parts import taken_apart
from planner.model.autocast import caching_only_with_graph

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recomputed:
    """What must be known of a layer that is recomputed, before it runs."""

    copies_input: bool
    """Whether its input would be written into, by the layer itself or, through a view, by one behind it."""
    carries: tuple[bool, ...]
    """Which of its output tensors carry a gradient."""


def recomputing(run: Callable[[Any], Any], layer: Recomputed, value: Any) -> Any:
    """`run(value)`, of which `value` alone is kept for backward: nests of tensors, and each time the same."""
    received, rebuild = taken_apart(value)
    # Where nobody will ask for a backward there is nothing to run again.
    if not any(layer.carries) or not torch.is_grad_enabled():
        return run(rebuild([tensor.clone() for tensor in received]) if layer.copies_input else value)
    # The function takes and returns flat tensors; how its results were nested is noted on the way.
    structure: list[Callable[[Sequence[Tensor]], Any]] = []

    def run_tensors(*tensors: Tensor) -> Tensors:
        if layer.copies_input:
            tensors = tuple(tensor.clone() for tensor in tensors)
        results, rebuild_results = taken_apart(run(rebuild(tensors)))
        structure.append(rebuild_results)
        return tuple(results)

    # An input that requires a gradient makes the outputs require one: the first layer of all has no other.
    anchor = torch.zeros((), requires_grad=True)
    results: Tensors = _Recomputing.apply(run_tensors, layer.carries, anchor, *received)  # type: ignore[no-untyped-call]
    # Autograd holds what it gives a backward to the end of it, and what it gives a hook in front of one no longer.
    node: Any = next(result.grad_fn for result in results if result.grad_fn is not None)
    node.register_prehook(partial(_take, node.arrived))
    return structure[0](results)


class _Recomputing(torch.autograd.Function):
    """A layer whose forward makes no graph, and whose backward makes one by running it again."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensors], carries: tuple[bool, ...], _anchor: Tensor, *tensors: Tensor
    ) -> Tensors:
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
        ctx.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        ctx.run = run
        ctx.arrived = []  # the gradients of its outputs, while nobody has used them
        ctx.save_for_backward(*tensors)
        # No zeros for outputs that nothing behind has used: they would be as large as these.
        ctx.set_materialize_grads(False)
        # What is returned becomes differentiable: it must be neither a view, which nobody behind could write into,
        # nor a parameter or a buffer that the layer passes along.
        with caching_only_with_graph():
            results = tuple(tensor.detach() for tensor in run(*tensors))
        ctx.mark_non_differentiable(*(tensor for tensor, carry in zip(results, carries, strict=True) if not carry))
        return results

    @staticmethod
    def backward(ctx: Any, *_taken: None) -> Any:
        # Leaves, so that the graph of this run ends here and not in what came before the layer.
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with ExitStack() as stack:
            # As it was in forward: the engine runs backwards without autocast.
            for kind, enabled, dtype in ctx.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            stack.enter_context(torch.enable_grad())
            # Views: of a leaf autocast would keep a low-precision copy until the end of the step.
            results = ctx.run(*(tensor.view_as(tensor) for tensor in inputs))
            pairs = [(t, gradient) for t, gradient in zip(results, ctx.arrived, strict=True) if t.requires_grad]
            ctx.arrived.clear()
            # From here on the gradients are in one list, which `_Start` empties, and the outputs in none.
            waiting = [gradient for _, gradient in pairs]
            start: Tensor = _Start.apply(waiting, *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
            del results, pairs
        # Outside the block: this backward runs without autocast, too.
        if start.requires_grad:
            start.backward()
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _take(into: list[Tensor | None], gradients: Tensors) -> tuple[None, ...]:
    """Takes the gradients out of autograd's hands, which passes on what is returned."""
    into.extend(gradients)
    return (None,) * len(gradients)


class _Start(torch.autograd.Function):
    """A scalar whose backward hands over gradients that are waiting; it holds neither these nor what they are of."""

    @staticmethod
    def forward(ctx: Any, waiting: list[Tensor | None], *results: Tensor) -> Tensor:
        # Not `save_for_backward`, which holds what it is given to the end of the backward.
        ctx.waiting = waiting
        return torch.zeros((), device=results[0].device if results else None)

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> Any:
        gradients = (None, *ctx.waiting)
        ctx.waiting.clear()
        return gradients
