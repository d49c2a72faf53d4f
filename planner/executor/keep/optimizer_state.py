"""The optimizer of a stage in a checkpoint: its state by the names of parameters, its options by groups of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.core.errors import FileError
from planner.executor.keep.rank_state import as_data
from planner.executor.keep.stored import StoredFolder

Groups = list[tuple[list[str], dict[str, Any]]]

_MEMBERS = ("params", "param_names")
"""Entries of a group that list its parameters on this rank."""


class OptimizerState:
    """What a checkpoint keeps of the optimizer of this rank's parameters, each under the first of its names."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], first_names: Mapping[str, str]
    ) -> None:
        self._optimizer, self._first_names = optimizer, first_names
        self._names = {id(parameter): first_names.get(name, name) for name, parameter in parameters.items()}

    def by_name(self) -> dict[str, dict[str, Any]]:
        """State of every parameter that has one.

        Raises:
            UsageError: It is no data.
        """
        held = {name: dict(self._optimizer.state[p]) for name, p in self._trained() if p in self._optimizer.state}
        state: dict[str, dict[str, Any]] = as_data(held, "the optimizer's state")
        return state

    def groups(self) -> Groups:
        """Options of every parameter group, beside the names of its parameters."""
        names = {id(p): name for name, p in self._trained()}
        return [
            (
                [names[id(p)] for p in group["params"] if id(p) in names],
                {key: value for key, value in group.items() if key not in _MEMBERS},
            )
            for group in self._optimizer.param_groups
        ]

    def stored(self, folder: StoredFolder) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds of `by_name` for this stage.

        Raises:
            FileError: It is damaged, or of another model.
        """
        trained = dict(self._trained())
        fused = {id(p) for g in self._optimizer.param_groups if _steps_on_device(g) for p in g["params"]}
        state: dict[str, dict[str, Any]] = {}
        for key, path in folder.index.paths.items():
            if path[:2] != ("optimizer", "state"):
                continue
            if len(path) != 4 or path[2] not in self._first_names:
                raise FileError(f'holds "{key}", which is no optimizer state of this model', path=folder.folder)
            name, part = str(path[2]), str(path[3])
            if name not in trained:
                continue
            # As torch's optimizers keep it: the count of steps on the CPU unless told otherwise.
            on_cpu = part == "step" and id(trained[name]) not in fused
            device = "cpu" if on_cpu else trained[name].device
            held = folder.tensor(key, device) if key in folder.index.tensors else folder.value(key)
            state.setdefault(name, {})[part] = held
        return state

    def restore(self, state: Mapping[str, dict[str, Any]], groups: Sequence[tuple[list[str], dict[str, Any]]]) -> None:
        """Goes on from the stage's `stored` state, and from the options of all ranks' groups."""
        for name, parameter in self._trained():
            if name in state:
                self._optimizer.state[parameter] = state[name]
        options = {name: options for names, options in groups for name in names}
        by_position = [options for _, options in groups]
        names = {id(p): name for name, p in self._trained()}
        for number, group in enumerate(self._optimizer.param_groups):
            by_name = [options[names[id(p)]] for p in group["params"] if names.get(id(p)) in options]
            # A group of none of these parameters (they were frozen, say) is told by its number.
            if by_name or number < len(by_position):
                options_of_group = by_name[0] if by_name else by_position[number]
                group.update({key: value for key, value in options_of_group.items() if key not in _MEMBERS})

    def _trained(self) -> list[tuple[str, Tensor]]:
        """The optimizer's parameters by the first of their names."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(self._names[id(p)], p) for p in held if id(p) in self._names]


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))
