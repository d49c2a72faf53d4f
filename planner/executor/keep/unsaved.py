"""State that is neither in tensors of the model nor in the optimizer's state of a parameter.

A checkpoint stores `get_extra_state()` of modules, and for an optimizer outside `torch.optim` the state that belongs to
no single parameter and further entries of its `state_dict`.

A checkpoint does not store plain attributes (Python numbers, random generators, tensors), buffers that are not
persistent, optimizers within an optimizer, and further optimizers that the script does not name. If these change in
training, a warning names them, because a resumed run would lose the change.
"""

import dis
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner.executor.run.stage_module import StageModule
from planner.model.python_state import (
    TENSOR,
    is_user_module,
    numbers_in_attributes,
    numbers_in_fields,
    without_leftover_tensors,
)

EXTRA_STATE = "extra state"
"""Name of the object with the extra state of modules."""

_STORED = ("state", "param_groups", "defaults", "step")
"""Attributes of an optimizer that `UnsavedState` ignores: three that checkpoints store, and the method `step`."""


def other_objects_with_state(model: nn.Module, stages: Sequence[StageModule], optimizer: Optimizer) -> dict[str, Any]:
    """Return objects whose `state_dict()` a checkpoint stores in addition to tensors of model and optimizer, by name.

    If a module of the model has extra state, `extra state` is an object with the extra state of this rank's modules.

    If the optimizer's class is not in `torch.optim`, `optimizer` is an object with the optimizer state that belongs to
    no parameter, and with further entries of the optimizer's `state_dict()`.

    All ranks return the same names, also ranks whose modules have no extra state.

    Args:
        model: The whole model.
        stages: Stages of this rank.
        optimizer: Optimizer of this rank.
    """
    objects: dict[str, Any] = {}
    if not type(optimizer).__module__.startswith("torch.optim"):
        objects["optimizer"] = _OptimizerState(optimizer)
    if any(map(_has_extra_state, model.modules())):
        objects[EXTRA_STATE] = _ExtraState(stages)
    return objects


class _OptimizerState:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        added = {k: value for k, value in self._optimizer.state_dict().items() if k not in ("state", "param_groups")}
        states: dict[Any, Any] = dict(self._optimizer.state)
        shared = {key: state for key, state in states.items() if not isinstance(key, Tensor)}
        return {"shared": shared, "added": added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.state.update(state["shared"])
        if state["added"]:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **state["added"]})


class _ExtraState:
    def __init__(self, stages: Sequence[StageModule]) -> None:
        self._modules = {path: module for path, module in _modules_of(stages).items() if _has_extra_state(module)}

    def state_dict(self) -> dict[str, Any]:
        return {path: module.get_extra_state() for path, module in self._modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, module in self._modules.items():
            module.set_extra_state(state[path])


class UnsavedState:
    """Detector of changed state that checkpoints do not contain. Create it before the first step.

    Args:
        stages: Stages of this rank.
        optimizer: Optimizer that the checkpoints contain.
        others: Function that returns the optimizers of the run that the checkpoints do not contain.
    """

    def __init__(
        self, stages: Sequence[StageModule], optimizer: Optimizer, others: Callable[[], Iterable[Optimizer]] = list
    ) -> None:
        self._others = others
        self._modules = {path: m for path, m in _modules_of(stages).items() if not _has_extra_state(m)}
        self._stages, self._optimizer = stages, optimizer
        self._at_start = numbers_in_attributes(self._modules)
        self._read = [
            f"{path}.{name}." for path, m in self._modules.items() for name in _attributes_read_first(type(m))
        ]
        self._numbers: dict[str, float] | None = None
        self._registered = self._tensors()

    def late_tensors(self) -> list[str]:
        """Return the names of parameters and persistent buffers that layers have registered since the previous call."""
        late = [name for name in self._tensors() if name not in self._registered]
        self._registered |= dict.fromkeys(late)
        return late

    def changed(self) -> list[str]:
        """Return the names of attributes and buffers that changed since the previous call; nothing at the first call.

        Call this method after the first step, which may fill caches, and after a later step.
        """
        every = numbers_in_attributes(self._modules)
        kept = {*self._at_start, *(name for name in every if name.startswith(tuple(self._read)))}
        numbers = without_leftover_tensors(every, kept)
        numbers |= self._numbers_of_buffers() | self._numbers_of_optimizer()
        numbers |= {f"{type(other).__name__}.state": math.nan for other in self._others() if other.state}
        before, self._numbers = self._numbers, numbers
        if before is None:
            return []
        return [name.removesuffix(TENSOR) for name, number in numbers.items() if number != before.get(name)]

    def _tensors(self) -> dict[str, None]:
        # Not only the modules at the start: layers may also add modules.
        names = (
            f"{path}.{name}"
            for stage in self._stages
            for path, module, _ in stage.reachable_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and name not in module._non_persistent_buffers_set
        )
        return dict.fromkeys(names)

    def _numbers_of_buffers(self) -> dict[str, float]:
        return {
            f"{path}.{name}": float(buffer.abs().sum(dtype=torch.float64))
            for path, module in self._modules.items()
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers.get(name)) is not None and buffer.dtype.is_floating_point
        }

    def _numbers_of_optimizer(self) -> dict[str, float]:
        kind, own = type(self._optimizer), vars(self._optimizer)
        if kind.state_dict is not Optimizer.state_dict:  # it stores what it needs
            return {}
        fields = {name: value for name, value in own.items() if name not in _STORED}
        for cls in kind.__mro__:
            fields |= {name: held for name, held in vars(cls).items() if is_user_module(cls.__module__)}
        # The state of an inner optimizer changes in each step. NaN differs from itself, so it counts as changed.
        inner = {
            f"{kind.__name__}.{name}": math.nan
            for name, value in fields.items()
            if any(isinstance(leaf, Optimizer) for leaf in tree_leaves(value))
        }
        return numbers_in_fields(kind.__name__, fields) | inner


def _attributes_read_first(cls: type[nn.Module]) -> set[str]:
    """Return the attributes that `forward` of a user's module reads before it sets them, such as a cache."""
    if not is_user_module(cls.__module__):
        return set()
    first: dict[Any, str] = {}
    for instruction in dis.get_instructions(cls.forward):
        if instruction.opname.endswith(("_ATTR", "_METHOD")):
            first.setdefault(instruction.argval, instruction.opname)
    return {name for name, operation in first.items() if operation.startswith("LOAD")}


def _modules_of(stages: Sequence[StageModule]) -> dict[str, nn.Module]:
    return {path: module for stage in stages for path, module in stage.finished_modules().items()}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
