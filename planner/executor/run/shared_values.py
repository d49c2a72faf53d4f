"""Check that the copies of a Python value stay equal if layers on several ranks use it.

Each rank has copies of the module-level variables of the user's files, and of objects that several modules have as
attributes, such as a configuration. A plain loop has one copy of each. `profile` finds layers that change such a value
in their first calls. A layer may also change it later: in its thousandth call, or when the loss is small. Layers on
other ranks would then use an old value. So the ranks compare the values after the second step, at each checkpoint and
at the end of the training loop.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from planner.core.errors import TrainingError
from planner.executor.run.module_settings import ModuleSettings
from planner.executor.run.placement import gather_from_all_ranks
from planner.executor.run.stage_module import StageModule
from planner.model.attributes import OF_EVERY_MODULE
from planner.model.python_state import (
    LENGTH,
    TENSOR,
    numbers_in_user_files,
    numbers_in_values,
    variables_read,
    without_leftover_tensors,
)

_NO_STATE: tuple[type, ...] = (NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NO_STATE += (type, FunctionType, MethodType, ModuleType, nn.Module)
"""Types of attributes that are never shared state: constants, code, and modules, whose attributes are read instead."""

_ROUNDING = 1e-3
"""Largest relative difference that can be a rounding error between devices of different kinds."""

Numbers = Mapping[str, Mapping[str, float]]
"""Numbers in module-level variables and shared objects. The first key names the variable, the second the number."""


class SharedValues:
    """Check of Python values that layers on several ranks use. Each rank has a copy of these values.

    Args:
        model: The whole model.
        stages: Stages of this process.
        loss_fn: Loss function on the last stage; None on other stages.
        group: Processes of this replica; None for all processes.
        device: Device of the tensors that ranks exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageModule],
        loss_fn: Callable[..., Any] | None,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        modules = {path: module for stage in stages for path, module in stage.finished_modules().items()}
        self._read = variables_read(modules, *([] if loss_fn is None else [loss_fn]))
        self._variables = partial(numbers_in_user_files, model, loss_fn, self._read)
        self._attributes = {
            name: (modules[path], attribute)
            for name, owners in _shared_attributes(model).items()
            for path, attribute in owners[::-1]
            if path in modules
        }
        self._group, self._device = group, device
        self._kept = {name for numbers in self._all_numbers().values() for name in numbers}
        self._settings = ModuleSettings(model, stages)
        self._num_steps = 0
        self._after_first_step: Numbers = {}

    def step_done(self) -> None:
        """Store the values after the first step, and compare them between ranks after the second step.

        Changes in the first step are ignored, because layers may fill caches in this step.
        """
        self._num_steps += 1
        if self._num_steps == 1:
            self._after_first_step = self._numbers()
            self._settings.remember()
        elif self._num_steps == 2:  # so that most changes are found before the first checkpoint
            self.check_equal()

    def check_equal(self) -> None:
        """Compare with other ranks the values that have changed since the first step. Every rank must call this method.

        Raises:
            TrainingError: A value differs from that of another rank whose layers may read it.
        """
        if not self._num_steps:
            return
        numbers = self._numbers()
        changed = _changed(self._after_first_step, numbers)
        settings = self._settings.changed_elsewhere()
        is_changed = torch.tensor(bool(changed or settings), dtype=torch.int32, device=self._device)
        dist.all_reduce(is_changed, op=dist.ReduceOp.MAX, group=self._group)
        if not is_changed:
            return
        self._settings.check_equal(gather_from_all_ranks(settings, self._group))
        names = {name for of_rank in gather_from_all_ranks(changed, self._group) for name in of_rank}
        own = {(top, name): numbers[top].get(name) for top, name in names if top in numbers}
        # A rank may have filled fewer entries of a cache.
        own = {key: value for key, value in own.items() if value is not None or not _is_entry(key[1], numbers[key[0]])}
        name = _first_difference(gather_from_all_ranks(own, self._group))
        if name is not None:
            variable = name.rpartition(":")[2].removesuffix(TENSOR)
            raise TrainingError(
                f'a layer has changed "{variable}" after the first step, and layers on another rank may read it: every '
                "rank has its own copy",
                hint="let `forward` return what later modules need, and keep values that last from step to step in "
                "buffers of the module that uses them; if the value selects the phase of a curriculum, profile and "
                "solve each phase with its own `--set`, and continue with `--weights`",
            )

    def _numbers(self) -> Numbers:
        return {top: without_leftover_tensors(values, self._kept) for top, values in self._all_numbers().items()}

    def _all_numbers(self) -> Numbers:
        by_top: dict[str, dict[str, float]] = {top: {} for top in self._read}
        for name, number in self._variables().items():
            file, _, path = name.partition(":")
            by_top[f"{file}:{path.partition('.')[0]}"][name] = number
        for top, (module, attribute) in self._attributes.items():
            if attribute in (held := {**module._buffers, **vars(module)}):
                by_top[top] = numbers_in_values({top: held[attribute]})
        return by_top


def _shared_attributes(model: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Find the objects that are attributes of several modules.

    Returns:
        The owners (module path, attribute) of each object. The key is the first owner as a text, such as
        `encoder.config`.
    """
    owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, value in chain(vars(module).items(), module._buffers.items()):
            if attribute not in OF_EVERY_MODULE and not isinstance(value, _NO_STATE) and not _holds_modules(value):
                owners[id(value)].append((path, attribute))
    return {".".join(filter(None, found[0])): found for found in owners.values() if len(found) > 1}


def _holds_modules(value: Any) -> bool:
    return any(isinstance(leaf, nn.Module) for leaf in tree_leaves([value, getattr(value, "__dict__", None)]))


def _changed(before: Numbers, after: Numbers) -> list[tuple[str, str]]:
    """Return the keys (variable, number) of changed numbers, without lengths and new entries of containers."""
    return [
        (top, name)
        for top, numbers in after.items()
        for name, number in numbers.items()
        if before.get(top, {}).get(name) != number
        and not name.endswith(LENGTH)
        and (name in before.get(top, {}) or not _is_entry(name, numbers))
    ]


def _is_entry(name: str, numbers: Mapping[str, float]) -> bool:
    return f"{name.rpartition('.')[0]}{LENGTH}" in numbers


def _first_difference(of_ranks: Sequence[Mapping[tuple[str, str], float | None]]) -> str | None:
    """Return the first number that differs between ranks, by its name (`model:CACHE.limit`); None if all are equal."""
    for key in sorted({key for values in of_ranks for key in values}):
        first, *others = [values[key] for values in of_ranks if key in values]
        if not all(_is_equal(first, other) for other in others):
            return key[1]
    return None


def _is_equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
