"""Copies of a model for its stages: modules of their own, as in a process of their own, and parameters in common.

Where the model can be built without memory for its parameters (`planner.model.lean`), only those that are asked for
exist, with random values: a parameter that begins as zero would hide what is wrong with the gradient of another.
"""

import copy
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from planner.executor.build.building import keep_only
from planner.executor.run.random_state import keeping_random_state, seed_process
from planner.model.held import named_tensors
from planner.model.lean import build_lean
from planner.model.load import LoadedModel
from planner.model.precision import converted

_POOL = 1_000_003
"""So many random numbers are drawn, and used again and again: a prime, which no row of a weight is a multiple of."""

_CPU = torch.device("cpu")


class Copies:
    """A model, and copies of it; where `lean`, parameters are made when asked for, with random values.

    Raises:
        ModelError: It cannot be built.
    """

    def __init__(self, loaded: LoadedModel, *, lean: bool) -> None:
        self._loaded = loaded
        with keeping_random_state():
            seed_process(0)
            model = converted(build_lean(loaded.build), loaded.precision) if lean else None
            self.is_lean = model is not None and all(p.is_meta for p in model.parameters())
            if model is None or not self.is_lean:
                seed_process(0)
                built = loaded.build()
                self._is_finished = not set(built.modules()).isdisjoint(loaded.build().modules())
                # What a file built once and for all, all of it or a part, is the user's own.
                model = converted(copy.deepcopy(built) if self._is_finished else built, loaded.precision)
        self._model = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._filled = {} if self.is_lean else {id(p): p for p in self._parameters.values()}
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
        self._begin = {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}

    def parameters(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The model's parameters of these names, with values; what is tied is one."""
        wanted = {name: self._parameters[name] for name in names if name in self._parameters}
        for name, parameter in wanted.items():
            if id(parameter) not in self._filled:
                self._filled[id(parameter)] = self._with_values(name, parameter)
        return {name: self._filled[id(parameter)] for name, parameter in wanted.items()}

    def num_bytes(self, names: Iterable[str]) -> tuple[int, int]:
        """Bytes of the parameters called so, each counted once, and of the largest of them."""
        names = set(names)
        wanted = {id(p): p.nbytes for name, p in self._parameters.items() if name in names}
        return sum(wanted.values()), max(wanted.values(), default=0)

    def copy(self, names: Iterable[str]) -> nn.Module:
        """An instance as it is when it has just been made, with the parameters called so, which all copies share.

        The buffers called so are its own, and all other parameters and buffers are absent.
        """
        names = set(names)
        with keeping_random_state():
            seed_process(0)
            if self.is_lean:
                other = converted(build_lean(self._loaded.build), self._loaded.precision)
            elif self._is_finished:
                other = copy.deepcopy(self._model, {id(p): p for p in self._parameters.values()})
            else:
                other = converted(self._loaded.build(), self._loaded.precision)
        buffers = {name: buffer for name, buffer in self._begin.items() if name in names}
        tensors = {**self.parameters(names), **self._fresh_buffers(buffers)}
        instead = {id(tensor): tensors[name] for name, tensor in named_tensors(other) if name in tensors}
        keep_only(other, lambda tensor: instead.get(id(tensor)), _CPU)
        return other

    def _fresh_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies; where a buffer has several names, one for all of them."""
        clones: dict[int, Tensor] = {}
        return {name: clones.setdefault(id(buffer), buffer.clone()) for name, buffer in buffers.items()}

    def _with_values(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        tensor = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=_CPU)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return nn.Parameter(tensor.zero_(), requires_grad=False)
        count = tensor.numel()
        flat = tensor.as_strided((count,), (1,))  # as it lies in memory, whatever its strides
        pool = self._pool[sum(map(ord, name)) * 7919 % (_POOL // 2) :]  # another stretch for every name
        for begin in range(0, count, len(pool)):
            flat[begin : begin + len(pool)] = pool[: count - begin]
        if tensor.ndim > 1:
            tensor.mul_(1 / math.sqrt(max(1, count // tensor.shape[0])))
        else:
            tensor.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
