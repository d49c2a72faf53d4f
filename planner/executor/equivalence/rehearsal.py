"""Repeat forwards of stages, to find code of the model that does something else in later steps.

Examples are a curriculum, and a loop whose length depends on the data. A forward under `torch.no_grad` is also
compared, because the first forward of a recomputed layer runs there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.build.building import StageRange, build_stages
from planner.executor.equivalence.isolation import ChildError, run_in_child
from planner.executor.run.random_state import StepSeeds
from planner.executor.run.shapes import describe_leaves
from planner.model.autocast import forward_context
from planner.model.chain import Chain
from planner.model.copying import copy_module
from planner.model.load import LoadedModel
from planner.model.nests import flatten, tensors_in
from planner.model.operators import OperatorWatch
from planner.model.python_state import TENSOR, numbers_in_user_files, variables_read, without_leftover_tensors
from planner.model.refusals import control_flow_error
from planner.model.seeding import seed_process
from planner.model.stage import ModelStage

_DEVICE = torch.device("cpu")

_FORWARDS = 64
_LIMIT_S = 1.0
"""CPU time in seconds after which `check_repeated_forwards` starts no further forward."""
_LIMIT = 1e-4
"""Largest relative difference of a loss that can be a rounding error."""
_MOST_STAGES = 4
_SAMPLES = 2
_MOST_PARAMETERS = 20_000_000
"""Largest number of parameters of a model that `check_repeated_forwards` checks."""


def check_repeated_forwards(loaded: LoadedModel, chain: Chain, *, limit_s: float) -> str:
    """Check, in a separate process, that later forwards of the layers do the same as the first one.

    Args:
        loaded: Loaded model file.
        chain: Layers of the model, on the meta device.
        limit_s: Seconds after which the process is ended.

    Returns:
        Text about a loss that differs under `torch.no_grad`; empty if it does not differ, or if the model is large.

    Raises:
        ChildError: A later forward does something else, or a layer needs values that only other stages have.
    """
    if sum(p.numel() for p in chain.model.parameters()) > _MOST_PARAMETERS:
        return ""
    try:
        return str(run_in_child(lambda: _RepeatedForwards(loaded, chain).run(), limit_s=limit_s))
    except ChildError as error:
        if error.is_user_error:
            raise
        return ""  # other errors have nothing to do with the path, and a run would raise them in its first steps


class _RepeatedForwards:
    def __init__(self, loaded: LoadedModel, chain: Chain) -> None:
        self._loaded, self._chain = loaded, chain
        count = len(chain.layers)
        stages = min(_MOST_STAGES, count)
        edges = [round(n * count / stages) for n in range(stages + 1)]
        ranges = [StageRange(first, end) for first, end in pairwise(edges)]
        # Build each stage separately, so that it lacks the parameters of other stages, as in a run. Building a stage
        # changes the model, and the file may return the same model each time.
        copied = replace(loaded, build=lambda: copy_module(loaded.build()))
        built = [build_stages(copied, chain, [one], seed=0, device=_DEVICE, may_build_whole=True)[0] for one in ranges]
        self._modules = [layer.module for layers in built for layer in layers]
        self._forward_index = [0]
        # Every layer of a Sequential is a module. Other models have one module for each stage.
        self._starts = edges if chain.outline is not None else range(count)
        for first, module in zip(self._starts, self._modules, strict=False):
            if isinstance(module, ModelStage):
                module.keep_state()
                module.call_at_layers(partial(_seed_generators, self._forward_index, first))
        self._shared = _SharedValues(loaded, chain.model, self._modules)

    def run(self) -> str:
        if self._chain.outline is None:
            self._refuse_numbers()
        differs = self._difference_without_gradients()
        end = time.process_time() + _LIMIT_S
        first = _ForwardObservations()
        while self._forward_index[0] < _FORWARDS and time.process_time() < end:
            seen = self._forward(self._shared.check)
            number = self._forward_index[0] + 1
            if self._chain.outline is not None and not torch.isfinite(seen.loss).all():
                raise control_flow_error(f"loss {number} is not a number: it may read other stages' tensors")
            first = first if self._forward_index[0] else seen
            if seen.trained != first.trained:
                raise control_flow_error(f"forward {number} computes gradients of other tensors than the first forward")
            for one, other in zip(seen.shapes[:-1], first.shapes, strict=False):
                if one != other:
                    raise control_flow_error(f"a layer returns {one} in forward {number}, and {other} in the first one")
            self._forward_index[0] += 1
        return differs

    def _refuse_numbers(self) -> None:
        # A Python number that a layer has read from a tensor would be constant in the next stages.
        value = self._loaded.example_batch(_SAMPLES).inputs
        scalar = torch.Tag.data_dependent_output
        for module in self._modules[:-1]:
            reads: list[bool] = []
            watch = OperatorWatch(before=lambda operator, *_, reads=reads: reads.append(scalar in operator.tags))
            with watch, torch.no_grad(), forward_context(self._loaded.precision, _DEVICE):
                value = module(value)
            number = next((leaf for leaf in flatten(value)[0] if isinstance(leaf, bool | int | float)), None)
            if any(reads) and number is not None:
                raise ModelError(
                    f"a layer reads values of tensors, such as by `.item()`, and returns the Python number {number}: "
                    "only tensors are sent to the next stages, so they would always use this number",
                    hint="return the number as a tensor, and read it in the layer that uses it",
                )

    def _difference_without_gradients(self) -> str:
        before = self._forward().loss
        with torch.no_grad():
            without = self._forward().loss
        # Two further forwards show state, also that of a layer that is skipped in every other forward.
        losses = []
        for _ in range(2):
            losses.append(self._forward().loss)
            self._shared.find_carried_tensors()
        has_state = not all(torch.equal(before, loss) for loss in losses)
        if has_state or torch.allclose(before, without, rtol=_LIMIT, equal_nan=True):
            return ""
        return (
            f"the loss is {float(without.sum()):.6g} where no gradients are computed, as in the first forward of a "
            f"recomputed stage, and {float(before.sum()):.6g} otherwise"
        )

    def _forward(self, check: Callable[[int, int], None] = lambda *_: None) -> "_ForwardObservations":
        seed_process(self._forward_index[0])
        batch = self._loaded.example_batch(_SAMPLES)
        value, seen = batch.inputs, _ForwardObservations()
        seen.trained += [p.requires_grad for module in self._modules for p in module.parameters()]
        with forward_context(self._loaded.precision, _DEVICE):
            for index, (first, module) in enumerate(zip(self._starts, self._modules, strict=False)):
                _seed_generators(self._forward_index, first, 0)
                value = module(value)
                seen.trained += _gradient_flags(module, value)
                seen.shapes.append(_describe_output(value))
                check(index, self._forward_index[0])
            seen.loss = self._loaded.loss_fn(value, batch.targets).detach()
            check(len(self._modules) - 1, self._forward_index[0])
        return seen


@dataclass
class _ForwardObservations:
    """Properties of one forward, to compare with those of the first forward."""

    trained: list[bool] = field(default_factory=list)
    """Flag `requires_grad` of each parameter, and of each output of a stage."""
    shapes: list[str] = field(default_factory=list)
    """Shapes and types that each layer returned, as text."""
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))


class _SharedValues:
    def __init__(self, loaded: LoadedModel, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        parts = [dict(m.finished_modules if isinstance(m, ModelStage) else m.named_modules()) for m in modules]
        self._read = [variables_read(part) for part in parts[:-1]] + [variables_read(parts[-1], loaded.loss_fn)]
        self._find = partial(numbers_in_user_files, model, loaded.loss_fn, set().union(*self._read))
        self._at_start = self._values = self._find()
        self._after_forward: dict[str, float] = {}
        self._kept = set(self._at_start)

    def find_carried_tensors(self) -> None:
        """Find the tensors in module-level variables that carry state from one forward to the next.

        Call this method after each of two forwards of the same batch. The first call stores the tensors' values. The
        second call compares the values. A tensor whose value has changed carries state. Other tensors that the
        forwards have created are results that no later forward reads.
        """
        before, self._after_forward = self._after_forward, self._find()
        self._kept |= {name for name, value in self._after_forward.items() if value != before.get(name, value)}

    def check(self, index: int, forward: int) -> None:
        """Raise an error if layer `index` changed a variable that another layer reads.

        Changes in forward 0, the first forward, are accepted, because they may fill a cache.
        """
        before, self._values = self._values, self._find()
        after = without_leftover_tensors(self._values, self._kept)
        for name in (name for name, value in after.items() if forward and value != before.get(name)):
            file, _, variable = name.removesuffix(TENSOR).rpartition(":")
            used = f"{file}:{variable.partition('.')[0]}"
            if any(used in variables for other, variables in enumerate(self._read) if other != index):
                raise ModelError(
                    f'`forward` changes the module-level value "{variable}" in its call {forward + 1}, and other '
                    "layers read it: every stage has its own copy",
                    hint="let `forward` return what later modules need, and keep values that last from step to step in "
                    "attributes or buffers of the module that uses them",
                )


def _describe_output(value: Any) -> str:
    kinds = Tensor | str | bool | int | float | None
    return describe_leaves([leaf for leaf in flatten(value)[0] if isinstance(leaf, kinds)])


def _gradient_flags(module: nn.Module, value: Any) -> list[bool]:
    # A layer of a Sequential may be skipped at random, which changes the flags.
    return [tensor.requires_grad for tensor in tensors_in(value)] if isinstance(module, ModelStage) else []


def _seed_generators(now: list[int], first: int, layer: int) -> None:
    StepSeeds(0, now[0]).seed_generators(first + layer, 0)
