"""Locate the state that a forward of layers may change.

Running statistics of batch normalization are listed too, but the executor changes them only once per mini-batch
(`planner.model.batch_norm`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.attributes import OF_EVERY_MODULE
from planner.model.nests import ABSENT
from planner.model.python_state import NUMBERS
from planner.model.stage import ModelStage

_SUM_BYTES = 16
"""Bytes per channel for the sum of the values and the sum of their squares, both in float64."""


class StateLocation(NamedTuple):
    """Location of a tensor in a module."""

    module: str
    """Path of the module."""
    holder: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        """Tensor that is now at this location; `ABSENT` if there is none."""
        return self.holder.get(self.name, ABSENT)


@dataclass(frozen=True)
class StatefulModule:
    """Module with state: buffers, frozen parameters, and tensors or numbers in plain attributes."""

    path: str
    module: nn.Module
    in_other_layers: frozenset[str] = frozenset()
    """Names of the module's tensors that belong to other layers."""
    tensors: tuple[str, ...] = ()
    """Names of plain attributes whose value is a tensor, or None (a forward may assign a tensor later)."""
    numbers: tuple[str, ...] = ()
    """Names of plain attributes whose value is a number; also `training`."""

    @classmethod
    def of(cls, path: str, module: nn.Module, in_other_layers: frozenset[str] = frozenset()) -> "StatefulModule":
        """Return a `StatefulModule` with the names of the tensors and numbers in plain attributes of `module`.

        Args:
            path: Path of the module.
            module: The module.
            in_other_layers: Names of the module's tensors that belong to other layers.
        """
        plain = [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
        tensors = tuple(name for name, value in plain if value is None or isinstance(value, Tensor))
        numbers = ("training", *(name for name, value in plain if type(value) in NUMBERS))
        return cls(path, module, in_other_layers, tensors, numbers)

    def locations(self) -> Iterator[StateLocation]:
        """Yield the locations of buffers, frozen parameters, and tensors in plain attributes."""
        for name in self.module._buffers:
            if name not in self.in_other_layers:
                yield StateLocation(self.path, self.module._buffers, name)
        for name, parameter in self.module._parameters.items():
            # Only the optimizer changes trained parameters.
            if name not in self.in_other_layers and parameter is not None and not parameter.requires_grad:
                yield StateLocation(self.path, self.module._parameters, name)
        for name in self.tensors:
            yield StateLocation(self.path, vars(self.module), name)


def stateful_modules(layers: Iterable[tuple[str, nn.Module]]) -> list[StatefulModule]:
    """Return the modules that own the state of `layers` (pairs of a name and a module), each module once."""
    by_module: dict[nn.Module, StatefulModule] = {}
    for name, layer in layers:
        for owner in _owners(name, layer):
            first = by_module.get(owner.module, owner)
            # A tensor that belongs to one of the layers is not `in_other_layers` for the others.
            by_module[owner.module] = replace(first, in_other_layers=first.in_other_layers & owner.in_other_layers)
    return list(by_module.values())


def trained_batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalizations in `module` that are in training mode and have running statistics."""
    parts = module.state_modules if isinstance(module, ModelStage) else module.modules()
    norms = (part for part in parts if isinstance(part, _BatchNorm))
    return [norm for norm in norms if norm.training and norm.running_mean is not None]


def batch_norm_statistics_bytes(module: nn.Module) -> int:
    """Return the memory for collecting batch normalization statistics in `module`, in bytes.

    Each channel needs mean and variance of the current micro-batch, in the dtype of the running statistics, and two
    sums. A layer that a forward calls several times is counted once.
    """
    means = [layer.running_mean for layer in trained_batch_norms(module) if layer.running_mean is not None]
    return sum(2 * mean.nbytes + _SUM_BYTES * mean.numel() for mean in means)


def _owners(name: str, layer: nn.Module) -> Iterator[StatefulModule]:
    if not isinstance(layer, ModelStage):
        for path, module in layer.named_modules(prefix=name):
            yield StatefulModule.of(path, module)
        return
    held: dict[str, set[str]] = {path: set() for path in layer.running_paths}
    for tensors in (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)):
        for full, _ in tensors:
            path, _, last = full.rpartition(".")
            held.setdefault(path, set()).add(last)
    for path, names in held.items():
        module = layer.model.get_submodule(path)
        yield StatefulModule.of(path, module, frozenset({*module._parameters, *module._buffers} - names))
