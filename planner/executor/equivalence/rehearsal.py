"""Repeat forwards of stages without training, to check that the model's code takes the same path every time.

The comparison with the reference trains for two steps. If the model's code takes another path in a later step (a
curriculum, or a loop whose length depends on the data), a run would fail at that step. Stages that run parts of the
model's `forward` detect another path, and raise an error. Code that trains other parameters in later steps is refused,
too.
"""

import time
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from planner.executor.build.building import StageRange, build_stages
from planner.executor.equivalence.isolation import Child, ChildError
from planner.executor.run.random_state import StepSeeds
from planner.model.autocast import forward_context
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.model.nests import tensors_in
from planner.model.refusals import control_flow_error
from planner.model.stage import ModelStage

_FORWARDS = 64
_LIMIT_S = 1.0
"""Time limit in seconds of CPU time, so that other processes do not reduce the number of forwards."""
_MOST_STAGES = 4
_SAMPLES = 2
_MOST_PARAMETERS = 20_000_000
"""Largest number of parameters of a model whose forwards are repeated."""


def repeat_forwards(loaded: LoadedModel, chain: Chain, *, limit_s: float) -> None:
    """Repeat the forward of all layers, in a separate process, until a forward takes another path or time is up.

    Args:
        loaded: The model.
        chain: Layers of the model, on the meta device.
        limit_s: Seconds after which the process is ended.

    Raises:
        ChildError: A forward took another path, which the model's code must not do.
    """
    if sum(p.numel() for p in chain.model.parameters()) > _MOST_PARAMETERS:
        return
    child = Child(partial(_forwards, loaded, chain), limit_s=limit_s)
    try:
        child.result()
    except ChildError as error:
        if error.is_user_error:
            raise
        # Other errors have nothing to do with the path, and a run would raise them in its first steps.
    finally:
        child.end()


def _forwards(loaded: LoadedModel, chain: Chain, _connection: Connection) -> None:
    count = len(chain.layers)
    stages = min(_MOST_STAGES, count)
    edges = [round(n * count / stages) for n in range(stages + 1)]
    device = torch.device("cpu")
    ranges = [StageRange(first, end) for first, end in pairwise(edges)]
    # Build each stage separately, so that it lacks the parameters of other stages, as in a run.
    built = [build_stages(loaded, chain, [one], seed=0, device=device)[0] for one in ranges]
    modules = [layer.module for layers in built for layer in layers]
    now = [0]
    # Every layer of a Sequential is a module. Other models have one module for each stage.
    starts = edges if chain.outline is not None else range(count)
    for first, module in zip(starts, modules, strict=False):
        if isinstance(module, ModelStage):
            module.keep_state()
            module.call_at_layers(partial(_plant, now, first))
    end = time.process_time() + _LIMIT_S
    first_trained: list[bool] = []
    while now[0] < _FORWARDS and time.process_time() < end:
        torch.manual_seed(now[0])
        batch = loaded.example_batch(_SAMPLES)
        value, trained = batch.inputs, [p.requires_grad for module in modules for p in module.parameters()]
        with forward_context(loaded.precision, device):
            for first, module in zip(starts, modules, strict=False):
                _plant(now, first, 0)
                value = module(value)
                trained += _trained_outputs(module, value)
            loss = loaded.loss_fn(value, batch.targets)
        if chain.outline is not None and not torch.isfinite(loss.detach()).all():
            raise control_flow_error(
                f"the loss of forward {now[0] + 1} is not a number: it may read other stages' tensors"
            )
        first_trained = first_trained or trained
        if trained != first_trained:
            raise control_flow_error(f"forward {now[0] + 1} computes gradients of other tensors than the first forward")
        now[0] += 1


def _trained_outputs(module: nn.Module, value: Any) -> list[bool]:
    """Return, for each output of a stage, True if it requires a gradient; empty for a layer of a Sequential.

    Such a layer may be skipped at random, so its outputs may differ.
    """
    return [tensor.requires_grad for tensor in tensors_in(value)] if isinstance(module, ModelStage) else []


def _plant(now: list[int], first: int, layer: int) -> None:
    """Seed the random generators for a layer in the current forward.

    Args:
        now: Index of the current forward, in a list because callbacks need its current value.
        first: Index of the stage's first layer.
        layer: Index of the layer within the stage.
    """
    StepSeeds(0, now[0]).seed_generators(first + layer, 0)
