"""Compare stages that run one after another in this process with the unpartitioned model."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.core.values.profile import Granularity
from planner.model.calling import arguments_of
from planner.model.chain import Chain, chain_of
from tests.zoo.real_model import loss_of

__all__ = ["Compared", "compare", "compare_all_ways", "sequences"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Differences between the stages and the model."""

    chain: Chain
    loss_error: float
    """Relative."""
    gradient_error: float
    """Largest difference of any parameter's gradient, relative to its largest number."""

    @property
    def crossing(self) -> list[int]:
        """Number of tensors that cross each boundary."""
        return [len(values) for values in self.chain.outline.crossings]


def compare(
    model: nn.Module,
    example_inputs: Callable[[int], Any],
    loss_fn: Callable[[Any], Tensor],
    *,
    granularity: Granularity = "coarse",
    num_stages: int = 3,
    sizes: tuple[int, ...] = (3, 3),
    recompute: bool = False,
) -> Compared:
    """Run micro-batches of `sizes` samples forward through all stages, then backward.

    Args:
        model: The model.
        example_inputs: Inputs of a number of samples.
        loss_fn: A scalar from the model's output.
        granularity: Coarse or fine cuts.
        num_stages: Number of nearly equal stages.
        sizes: Samples of each micro-batch; all are in flight at once.
        recompute: Recompute the stages in backward.
    """
    chain = chain_of(model, example_inputs, granularity, loss_of=lambda _size: loss_fn)
    num_layers = len(chain.layers)
    cuts = sorted({round(num_layers * k / num_stages) for k in range(num_stages + 1)})
    micro_batches = [example_inputs(size) for size in sizes]
    loss, gradients = _in_one_piece(model, micro_batches, loss_fn)
    model.zero_grad()
    flights = [
        _Flight(chain, cuts, inputs, loss_fn, seed, recompute=recompute) for seed, inputs in enumerate(micro_batches)
    ]
    for flight in flights:
        flight.backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == gradients.keys(), own.keys() ^ gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    cut_loss = sum(float(flight.loss.detach()) for flight in flights)
    return Compared(
        chain=chain,
        loss_error=abs(cut_loss - loss) / max(abs(loss), 1e-30),
        # A gradient that is nothing but rounding errors is compared with the largest of all.
        gradient_error=max(
            float((own[name] - g).abs().max()) / max(float(g.abs().max()), 1e-5 * largest, 1e-30)
            for name, g in gradients.items()
        ),
    )


def sequences(batch: int) -> Tensor:
    """Return inputs of most models in tests: (batch, 5, 8)."""
    return torch.randn(batch, 5, 8)


def compare_all_ways(
    model: nn.Module, example_inputs: Callable[[int], Any] = sequences, *, num_stages: int = 3, sizes: Any = (3, 3)
) -> Compared:
    """Compare fine and coarse cuts with the model, with and without recomputation; return the last comparison."""
    for granularity in ("fine", "coarse"):
        for recompute in (True, False):
            ways = {"granularity": granularity, "recompute": recompute, "num_stages": num_stages, "sizes": sizes}
            result = compare(model, example_inputs, loss_of, **ways)
            assert result.loss_error < 1e-6
            assert result.gradient_error < 1e-5
    return result


def _in_one_piece(
    model: nn.Module, micro_batches: list[Any], loss_fn: Callable[[Any], Tensor]
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    total = 0.0
    for seed, inputs in enumerate(micro_batches):
        torch.manual_seed(seed)
        args, kwargs = arguments_of(inputs)
        loss = loss_fn(model(*args, **kwargs))
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class _Flight:
    """One micro-batch in the stages."""

    def __init__(
        self,
        chain: Chain,
        cuts: list[int],
        inputs: Any,
        loss_fn: Callable[[Any], Tensor],
        seed: int,
        *,
        recompute: bool,
    ) -> None:
        torch.manual_seed(seed)
        self._edges: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        value = inputs
        for first, end in pairwise(cuts):
            stage = chain.stage(first, end)
            if first:
                leaves = [t.detach().contiguous().requires_grad_(t.requires_grad) for t in value]
                self._edges.append((leaves, value))
                value = tuple(leaves)
            value = _run(stage, value, recompute=recompute)
        self.loss = loss_fn(value)

    def backward(self) -> None:
        """Run the backward from the loss to the first stage."""
        self.loss.backward()
        while self._edges:
            leaves, sent = self._edges.pop()
            pairs = [(t, leaf.grad) for t, leaf in zip(sent, leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])


def _run(stage: nn.Module, value: Any, *, recompute: bool) -> Any:
    def run(*tensors: Tensor) -> Any:
        # Copies, as the executor makes them where a stage writes into what it receives.
        return stage(tuple(tensor.clone() for tensor in tensors))

    if not (isinstance(value, tuple) and all(isinstance(t, Tensor) and t.is_leaf for t in value)):
        return stage(value)
    return checkpoint(run, *value, use_reentrant=False) if recompute else run(*value)
