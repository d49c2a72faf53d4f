"""Unpartitioned training that draws random numbers and collects statistics as the stages do."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.load import LoadedModel
from planner.model.seeding import layer_seed

__all__ = ["Drawing", "Once"]


class Drawing:
    """Seeds the generators at the start of each layer, by hooks on the model's modules."""

    def __init__(self, loaded: LoadedModel, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._step = self._micro_batch = 0
        # To find the layers, a model may have to run, which changes what it counts.
        with torch.random.fork_rng():
            chain = loaded.chain(model if isinstance(model, nn.Sequential) else loaded.build())
        if chain.outline is None:
            for number, layer in enumerate(chain.layers):
                layer.module.register_forward_pre_hook(partial(self._begin, number))
            return
        model.register_forward_pre_hook(partial(self._begin, 0))
        calls = chain.outline.recording.calls
        layer_at = {cut: number for number, cut in enumerate(chain.outline.cuts, 1)}
        for path in {call.path for call in calls}:
            # A module may be called several times, and a layer may begin with or after one of the calls.
            same = [call for call in calls if call.path == path]
            behind = [layer_at.get(call.exit + 1) for call in same]
            with_it = [layer_at.get(call.enter) for call in same]
            module = model.get_submodule(path)
            if any(behind):
                module.register_forward_hook(partial(self._at_edge, itertools.cycle(behind)))
            if any(with_it):
                module.register_forward_pre_hook(partial(self._at_edge, itertools.cycle(with_it)))

    def at(self, step: int, micro_batch: int) -> None:
        """Set the micro-batch and step that run next."""
        self._step, self._micro_batch = step, micro_batch

    def _at_edge(self, layers: Iterator[int | None], *_: Any) -> None:
        layer = next(layers)
        if layer is not None:
            self._begin(layer)

    def _begin(self, layer: int, *_: Any) -> None:
        # Not `torch.manual_seed`, which asks every kind of device there may be, and takes a stack trace for each.
        torch.default_generator.manual_seed(layer_seed(self._seed, self._step, layer, self._micro_batch))


class Once:
    """Updates batch norms at the end, each call with all of its inputs at once.

    Args:
        modules: The batch norms.
        micro_batches: Number of micro-batches of the mini-batch.
    """

    def __init__(self, modules: Sequence[_BatchNorm], micro_batches: int) -> None:
        self._modules = modules
        self._micro_batches = micro_batches

    def __enter__(self) -> None:
        self._inputs: dict[_BatchNorm, list[Tensor]] = {module: [] for module in self._modules}
        self._before = [(m.num_batches_tracked.clone(), m.momentum) for m in self._modules]
        self._hooks = [m.register_forward_pre_hook(self._keep) for m in self._modules]
        for module in self._modules:
            module.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, (tracked, momentum) in zip(self._modules, self._before, strict=True):
            module.momentum = momentum
            module.num_batches_tracked.copy_(tracked)
            inputs = self._inputs[module]
            # A layer that is called twice in a forward is updated twice.
            calls = len(inputs) // self._micro_batches
            for call in range(calls):
                self._update(module, inputs[call::calls])

    @staticmethod
    def _update(module: _BatchNorm, inputs: Sequence[Tensor]) -> None:
        values = torch.cat([value.transpose(0, 1).flatten(1) for value in inputs], 1).double()
        twin = nn.BatchNorm1d(len(values), momentum=module.momentum, dtype=torch.float64)
        twin.load_state_dict(module.state_dict(), strict=False)
        twin(values.t())
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            getattr(module, name).copy_(getattr(twin, name))

    def _keep(self, module: _BatchNorm, args: tuple[Tensor]) -> None:
        self._inputs[module].append(args[0].detach().clone())
