"""A real model trained for one step by stages that are built apart, each as its rank builds it, in this process.

Nothing is shared between the stages: what one of them leaves behind in an attribute, the next one does not see. They
are the executor's own modules, with its recomputation, random numbers and deferred batch normalisation; only sending
and receiving is done here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from planner.core.values.plan import Recompute
from planner.core.values.profile import Granularity
from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.shapes import ChainShapes, chain_shapes
from planner.executor.run.stage_module import StageModule
from planner.model.batch_norm import BatchStatistics
from planner.model.calling import arguments_of
from planner.model.chain import Chain, Layer
from planner.model.load import Batch, LoadedModel, load_module
from tests.support.one_piece import Drawing, Once
from tests.zoo.real_model import RealModel

__all__ = ["Differences", "Whole", "as_loaded", "compare_apart", "even_cuts"]

SEED = 5


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest relative differences of a step of stages from one of the unpartitioned model."""

    loss: float
    """Relative."""
    gradient: float
    """The largest of any parameter, relative to its largest number."""
    buffer: float
    """The largest of any buffer, in whatever stage it is, relative to its largest number."""
    num_gradients: int
    num_buffers: int
    """Those that the step changes."""

    @property
    def worst(self) -> float:
        """Largest of all three."""
        return max(self.loss, self.gradient, self.buffer)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A step of the unpartitioned model on the same micro-batches, one after another."""

    loaded: LoadedModel
    chain: Chain
    micro_batches: tuple[Batch, ...]
    loss: float
    gradients: dict[str, Tensor]
    """Under every name that a parameter has."""
    buffers: dict[str, Tensor]
    changed: frozenset[str]
    """Buffers that the step has changed."""

    @classmethod
    def of(cls, real: RealModel, granularity: Granularity = "coarse", *, sizes: Sequence[int] = (3, 2)) -> "Whole":
        """Run the step; `sizes` are the numbers of samples of each micro-batch."""
        loaded = as_loaded(real, granularity)
        torch.manual_seed(SEED)
        model = loaded.build()
        before = {name: b.clone() for name, b in _buffers(model)}
        drawing = Drawing(loaded, model, SEED)
        torch.manual_seed(SEED)
        micro_batches = tuple(map(loaded.example_batch, sizes))
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None]
        total = 0.0
        with Once(norms, len(sizes)):
            for number, batch in enumerate(micro_batches):
                drawing.at(0, number)
                args, kwargs = ((batch.inputs,), {}) if _is_chain(model) else arguments_of(batch.inputs)
                loss = real.loss(model(*args, **kwargs), batch.targets)
                loss.backward()
                total += float(loss.detach())
        named = model.named_parameters(remove_duplicate=False)
        return cls(
            loaded=loaded,
            chain=build_structure(loaded),
            micro_batches=micro_batches,
            loss=total,
            gradients={name: _dense(p.grad) for name, p in named if p.grad is not None},
            buffers=dict(_buffers(model)),
            changed=frozenset(name for name, b in _buffers(model) if not torch.equal(b, before[name])),
        )


def as_loaded(real: RealModel, granularity: Granularity = "coarse") -> LoadedModel:
    """Return `real` as a model file would offer it."""
    loaded = load_module(
        nn.Identity(),
        example_batch=lambda size: (real.inputs(size), None),
        loss_fn=None if real.no_loss_fn else real.loss,
        granularity=granularity,
    )
    return replace(loaded, build=real.build)


def even_cuts(num_layers: int, num_stages: int = 3) -> list[int]:
    """Return the first layer of each of `num_stages` nearly equal stages, and the end."""
    return sorted({round(num_layers * k / num_stages) for k in range(num_stages + 1)})


def compare_apart(
    whole: Whole, cuts: Sequence[int], recompute: Recompute = "never", *, together: bool = False
) -> Differences:
    """Compare a step of stages that begin at `cuts`, which end with the last layer, with the whole model.

    Args:
        whole: The unpartitioned model.
        cuts: The first layer of every stage, and the end.
        recompute: Micro-batches on which the stages are recomputed.
        together: Build the stages in one model, as those of one process; this is faster.

    Raises:
        ModelError: The stages cannot be built or run.
        AssertionError: The stages have gradients of other parameters than the model, or lack a buffer that it changes.
    """
    shapes = [chain_shapes(whole.chain, batch.inputs) for batch in whole.micro_batches]
    ranges = [StageRange(first, end) for first, end in pairwise(cuts)]
    builds = [ranges] if together else [[each] for each in ranges]
    stages: list[_Stage] = []
    for some in builds:
        built = build_stages(whole.loaded, whole.chain, some, seed=SEED, device=torch.device("cpu"))
        statistics = BatchStatistics()
        common = partial(_Stage, whole, shapes, recompute=recompute, statistics=statistics)
        stages += [common(layers, each) for layers, each in zip(built, some, strict=True)]
    losses = [_forward(stages, batch, number) for number, batch in enumerate(whole.micro_batches)]
    for number, loss in enumerate(losses):
        _backward(stages, loss, number)
    for statistics in dict.fromkeys(stage.module.statistics for stage in stages):
        statistics.update_running_statistics()
    return _differences(whole, [stage.module for stage in stages], losses)


# Private functions


class _Stage:
    """One stage, with the tensors that it has received and sent for each micro-batch in flight."""

    def __init__(
        self,
        whole: Whole,
        shapes: Sequence[ChainShapes],
        layers: Sequence[Layer],
        stage: StageRange,
        *,
        recompute: Recompute,
        statistics: BatchStatistics,
    ) -> None:
        self._shapes = shapes
        self._first, end = stage.first, stage.end
        boundaries = shapes[0].boundaries
        self._is_last = is_last = end == len(whole.chain.layers)
        self.module = StageModule(
            layers,
            received=boundaries[self._first],
            recompute=recompute,
            micro_batches=len(whole.micro_batches),
            loss_fn=whole.loaded.loss_fn if is_last else None,
            copies_input=shapes[0].stage_writes_input(self._first, end),
            carries=() if is_last else [t.requires_grad for t in boundaries[end].tensors],
            first_layer=self._first,
            statistics=statistics,
        )
        self.module.seeds = StepSeeds(SEED, 0)
        self.module.targets = [batch.targets for batch in whole.micro_batches]
        self._behind = [each.boundaries[end].tensors for each in shapes]
        self.received: list[list[Tensor]] = []
        self.sent: list[list[Tensor]] = []

    def run(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors sent for a micro-batch; of the last stage, the loss."""
        self.at(number)
        metas = self._shapes[number].boundaries[self._first].tensors
        leaves = [t.detach().clone().requires_grad_(m.requires_grad) for t, m in zip(tensors, metas, strict=True)]
        result = self.module(*leaves)
        self.received.append(leaves)
        self.sent.append([result] if isinstance(result, Tensor) else list(result))
        if not self._is_last:
            sent, expected = (
                [(tuple(t.shape), t.dtype) for t in some] for some in (self.sent[-1], self._behind[number])
            )
            assert sent == expected, f"the next stage expects {expected}, and {sent} is sent"
        return self.sent[-1]

    def at(self, number: int) -> None:
        """Set the micro-batch that runs next."""
        self.module.micro_batch = number
        self.module.received = self._shapes[number].boundaries[self._first]


def _forward(stages: Sequence[_Stage], batch: Batch, number: int) -> Tensor:
    tensors = [leaf for leaf in tree_flatten(batch.inputs)[0] if isinstance(leaf, Tensor)]
    for stage in stages:
        tensors = stage.run(tensors, number)
    (loss,) = tensors
    return loss


def _backward(stages: Sequence[_Stage], loss: Tensor, number: int) -> None:
    stages[-1].at(number)
    loss.backward()
    for stage, behind in zip(reversed(stages[:-1]), reversed(stages[1:]), strict=True):
        stage.at(number)
        pairs = zip(stage.sent[number], behind.received[number], strict=True)
        carried = [(t, leaf.grad) for t, leaf in pairs if leaf.grad is not None and t.requires_grad]
        torch.autograd.backward([t for t, _ in carried], [gradient for _, gradient in carried])


def _differences(whole: Whole, modules: Sequence[StageModule], losses: Sequence[Tensor]) -> Differences:
    gradients = _summed(modules, whole)
    assert gradients.keys() == whole.gradients.keys(), gradients.keys() ^ whole.gradients.keys()
    buffers = [(name, b) for module in modules for name, b in _buffers(module)]
    missing = whole.changed.difference(name for name, _ in buffers)
    assert not missing, missing
    loss = sum(float(each.detach()) for each in losses)
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    # What is nothing but rounding errors is compared with the largest of all.
    off = partial(_relative, least=1e-3 * largest)
    floats = [whole.buffers[name] for name in whole.changed if whole.buffers[name].is_floating_point()]
    kept = partial(_relative, least=1e-3 * max((float(b.abs().max()) for b in floats if b.numel()), default=0.0))
    return Differences(
        loss=abs(loss - whole.loss) / max(abs(whole.loss), 1e-30),
        gradient=max((off(gradients[name], g) for name, g in whole.gradients.items()), default=0.0),
        buffer=max((kept(b, whole.buffers[name]) for name, b in buffers if name in whole.buffers), default=0.0),
        num_gradients=len({id(g) for g in whole.gradients.values()}),
        num_buffers=len(whole.changed),
    )


def _summed(modules: Sequence[StageModule], whole: Whole) -> dict[str, Tensor]:
    """Return the gradients of all stages under every name, summed over stages for tied parameters."""
    by_name = [dict(m.named_parameters(remove_duplicate=False)) for m in modules]
    result: dict[str, Tensor] = {}
    for names in _ties(whole.chain.model):
        copies = {id(held[n]): held[n] for held in by_name for n in names if n in held}
        gradients = [_dense(p.grad) for p in copies.values() if p.grad is not None]
        if gradients:
            result |= dict.fromkeys(names, torch.stack(gradients).sum(0))
    return result


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def _relative(value: Tensor, expected: Tensor, least: float = 0.0) -> float:
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(value, expected) else 1.0
    return float((value - expected).abs().max()) / max(float(expected.abs().max()), least, 1e-30)


def _dense(tensor: Tensor | None) -> Tensor:
    return tensor.detach().clone()


def _is_chain(model: Any) -> bool:
    return isinstance(model, nn.Sequential)
