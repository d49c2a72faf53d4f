"""State of a rank's optimizer in a checkpoint: state by parameter name, and options by parameter group."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.executor.keep.stored import StoredCheckpoint
from planner.model.load import to_device

ParameterGroups = list[tuple[list[str], dict[str, Any]]]

_MEMBERS = ("params", "param_names")
"""Keys of a parameter group under which torch lists the group's parameters."""


class OptimizerState:
    """State of a rank's optimizer, by parameter name. A tied parameter has several names; the first one is used."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], canonical_names: Mapping[str, str]
    ) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): canonical_names.get(name, name) for name, parameter in parameters.items()}

    def state_by_name(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter, by name. Parameters without state are left out."""
        return {
            name: dict(self._optimizer.state[p]) for name, p in self._named_parameters() if p in self._optimizer.state
        }

    def parameter_groups(self) -> ParameterGroups:
        """Return, for every parameter group, the names of this rank's parameters and the group's options."""
        return [
            (
                [self._names[id(p)] for p in group["params"] if id(p) in self._names],
                {key: value for key, value in group.items() if key not in _MEMBERS},
            )
            for group in self._optimizer.param_groups
        ]

    def read_from(self, checkpoint: StoredCheckpoint) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of this rank's parameters, read from a checkpoint, by name.

        Raises:
            FileError: The checkpoint is damaged.
        """
        groups = [g for g in self._optimizer.param_groups if g.get("capturable") or g.get("fused")]
        on_device = {id(p) for group in groups for p in group["params"]}
        states: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named_parameters():
            state = checkpoint.file_of_tensor(name)[0].optimizer_state(name)
            # As in torch's optimizers, the step count is on the CPU unless the optimizer steps on the device.
            states[name] = {
                part: held if part == "step" and id(parameter) not in on_device else to_device(held, parameter.device)
                for part, held in state.items()
            }
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Mapping[str, dict[str, Any]], groups: Sequence[tuple[list[str], dict[str, Any]]]) -> None:
        """Restore the optimizer's state and options from a checkpoint.

        Args:
            state: State of each parameter, as `read_from` returned it.
            groups: Parameter names and options of each parameter group, from all files of the checkpoint that this rank
                has read.
        """
        for name, parameter in self._named_parameters():
            if name in state:
                self._optimizer.state[parameter] = state[name]
        options = {name: options for names, options in groups for name in names}
        by_position = [options for _, options in groups]
        for number, group in enumerate(self._optimizer.param_groups):
            by_name = [options[self._names[id(p)]] for p in group["params"] if self._names.get(id(p)) in options]
            # A group without any of these parameters (frozen ones, for example) is matched by its index.
            if by_name or number < len(by_position):
                options_of_group = by_name[0] if by_name else by_position[number]
                group.update({key: value for key, value in options_of_group.items() if key not in _MEMBERS})

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(self._names[id(p)], p) for p in held if id(p) in self._names]
