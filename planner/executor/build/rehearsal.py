"""Stages one after the other in this process, as the executor builds and runs them, without processes and transfers.

What is sent becomes a leaf on the other side, and a gradient that did not come about is sent as zeros, as between two
processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from planner.core.values.plan import Recompute
from planner.executor.build.assembly import stage_module_of
from planner.executor.build.building import StageRange, held_names, like
from planner.executor.build.copies import Copies
from planner.executor.run.parts import tensors_of
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.shapes import Shapes, shapes_of
from planner.executor.run.stage_module import StageModule
from planner.model.autocast import keeping_casts, layers_in
from planner.model.batch_norm import BatchStatistics
from planner.model.chain import Chain
from planner.model.load import Batch, LoadedModel

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A step of the first layers of a model, to be run in one piece or in stages."""

    loaded: LoadedModel
    chain: Chain
    shapes: Shapes
    copies: Copies
    micro_batches: tuple[Batch, ...]
    micro_batch_size: int
    num_layers: int
    """How many layers take part; behind the last of them there is the loss only if that is the model's last."""

    @classmethod
    def of(cls, loaded: LoadedModel, chain: Chain, copies: Copies, *, samples: int) -> "Rehearsal":
        """A step of two example micro-batches of so many samples, through all layers."""
        torch.manual_seed(1)
        batches = tuple(loaded.example_batch(samples) for _ in range(2))
        return cls(
            loaded=loaded,
            chain=chain,
            shapes=shapes_of(chain, batches[0].inputs, precision=loaded.precision, device=_CPU),
            copies=copies,
            micro_batches=batches,
            micro_batch_size=samples,
            num_layers=len(chain.layers),
        )

    def run(
        self, ends: Sequence[int], recompute: Recompute, *, sign: float = 1.0, as_trained: bool = False
    ) -> "Outcome":
        """One step; its gradients times `sign` are added to those of the parameters.

        Args:
            ends: The layer behind the last of each stage. A single one: the model in one piece, as it is.
            recompute: What all stages recompute.
            sign: What the loss is multiplied with.
            as_trained: Whether what is recomputed runs with a graph the first time, too. Without one torch may take
                another kernel (of attention, say), whose results differ by rounding errors.
        """
        edges = [0, *ends]
        statistics = [BatchStatistics() for _ in ends]
        modules = [
            self.stage(StageRange(first, end), recompute, collected, as_trained=as_trained)
            for (first, end), collected in zip(pairwise(edges), statistics, strict=True)
        ]
        total = 0.0
        with keeping_casts(self.loaded.precision, _CPU):
            flights = []
            for number, batch in enumerate(self.micro_batches):
                flights.append(_Flight(modules, number, batch, self.loaded))
                total += flights[-1].loss
                # In one piece no two micro-batches are in flight, as in a plain loop that accumulates gradients.
                if len(modules) == 1:
                    flights.pop().backward(sign / len(self.micro_batches))
            # In stages all forwards come first (GPipe), so that state which a later micro-batch changes is seen to.
            while flights:
                flights.pop(0).backward(sign / len(self.micro_batches))
        # As at the end of a step of training: until then no running statistics have changed.
        for collected in statistics:
            collected.commit()
        buffers: dict[str, list[Tensor]] = {}
        for module in modules:
            for name, buffer in module.named_buffers(remove_duplicate=False):
                buffers.setdefault(name, []).append(buffer)
        return Outcome(total / len(self.micro_batches), buffers)

    def in_one_piece(self, *, sign: float = 1.0) -> "Outcome":
        """The same without cuts and recomputation."""
        return self.run([self.num_layers], "never", sign=sign)

    def stage(
        self,
        layers: StageRange,
        recompute: Recompute = "never",
        statistics: BatchStatistics | None = None,
        *,
        as_trained: bool = False,
    ) -> StageModule:
        """A stage in a copy of its own; see `run`."""
        # All else is absent in the copy, and says its name when it is read: so a cut that is wrong is found out.
        names = held_names(self.chain, layers.first, layers.end)
        built = layers.of(like(self.chain, self.loaded, self.copies.copy(names)))
        # Autograd's mode is what torch chooses kernels by: a layer that will be recomputed runs without a graph first.
        if as_trained:
            for layer in built:
                vars(layer.module)["forward"] = torch.enable_grad()(layer.module.forward)
        module = stage_module_of(
            built,
            layers,
            self.shapes,
            recompute=recompute,
            micro_batches=len(self.micro_batches),
            loss_fn=self.loaded.loss_fn if layers.end == len(self.chain.layers) else None,
            statistics=statistics or BatchStatistics(),
        )
        # In one piece and in stages every layer draws the same, however often it runs.
        module.seeds = StepSeeds(0, 0)
        module.targets = [batch.targets for batch in self.micro_batches]
        return module


@dataclass(frozen=True)
class Outcome:
    """What a step left behind."""

    loss: float
    buffers: dict[str, list[Tensor]]
    """By name, those of every stage that has it."""


class _Flight:
    """One micro-batch on its way through the stages."""

    def __init__(self, modules: Sequence[StageModule], number: int, batch: Batch, loaded: LoadedModel) -> None:
        self._edges: list[tuple[list[Tensor], list[Tensor]]] = []
        """What each stage received, and what it put out."""
        received = tensors_of(batch.inputs)
        for module in modules:
            module.micro_batch = number
            if self._edges:
                # A leaf, as a buffer is that a transfer fills: the graph ends here, and its gradient is "sent" back.
                metas = module.received.tensors
                pairs = zip(received, metas, strict=True)
                received = [t.detach().requires_grad_(meta.requires_grad) for t, meta in pairs]
            with layers_in(loaded.precision, _CPU):
                outputs = tensors_of(module(*received))
            self._edges.append((received, outputs))
            received = outputs
        probes = [_probe(output) for output in received]
        # In float64, so that the sum makes no rounding error of its own.
        self.loss = sum(float((t.detach().double() * p).sum()) for t, p in zip(received, probes, strict=True))
        self._gradients = [p.to(t.dtype) for t, p in zip(received, probes, strict=True) if t.requires_grad]

    def backward(self, factor: float) -> None:
        """The backwards of all stages, from the last to the first."""
        gradients = [gradient * factor for gradient in self._gradients]
        # Taken out one by one, so that a stage's graph is gone when its backward is over.
        while self._edges:
            received, outputs = self._edges.pop()
            carrying = [output for output in outputs if output.requires_grad]
            # Where nothing trained lies in or before a stage there is no graph, and nothing to do.
            if carrying:
                torch.autograd.backward(carrying, gradients)
            gradients = [_gradient(leaf) for leaf in received if leaf.requires_grad]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _probe(output: Tensor) -> Tensor:
    """What the gradient begins with: one for a loss; where the model goes on behind, numbers of either sign."""
    if output.numel() == 1:
        return torch.ones_like(output, dtype=torch.float64)
    # Drawn alike in every run. Ones alone would come back from a normalisation as a gradient of zero.
    generator = torch.Generator().manual_seed(output.numel())
    signs = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.float64)
    return (signs * 2 - 1) / math.sqrt(output.numel())
