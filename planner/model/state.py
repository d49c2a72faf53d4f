"""Locate the state that layers hold and that a forward may change.

Running statistics of batch normalization are excluded. The executor collects them over the micro-batches
(`planner.model.batch_norm`), so that they are those of whole mini-batches. The profile counts the memory for that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.python_state import NUMBERS
from planner.model.stage import ModelStage

ABSENT = object()
"""Placeholder for a missing value."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_SUM_BYTES = 16
"""Bytes per channel, in float64: sums of values and of their squares."""


class StateLocation(NamedTuple):
    """Location of a tensor in a module, where another tensor may replace it."""

    module: str
    """Path of its module."""
    holder: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        """Current value at this location."""
        return self.holder.get(self.name, ABSENT)


@dataclass(frozen=True)
class StateOwner:
    """Module with state: buffers, frozen parameters, and plain attributes that are tensors or numbers."""

    path: str
    module: nn.Module
    elsewhere: frozenset[str] = frozenset()
    """Names of tensors of the module that belong to other layers."""
    tensors: tuple[str, ...] = ()
    """Plain attributes that are tensors, or None at the start."""
    numbers: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, module: nn.Module, elsewhere: frozenset[str] = frozenset()) -> "StateOwner":
        """Return the module with its plain attributes; None counts as one, because it may become a tensor later.

        Args:
            path: Path of the module.
            module: The module.
            elsewhere: Names of tensors that belong to other layers.

        Returns:
            The module as an owner of state.
        """
        plain = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
        tensors = tuple(name for name, value in plain if value is None or isinstance(value, Tensor))
        numbers = tuple(name for name, value in plain if type(value) in NUMBERS)
        return cls(path, module, elsewhere, tensors, numbers)

    def locations(self) -> Iterator[StateLocation]:
        """Yield the locations of all state but numbers."""
        for name in self.module._buffers:
            if name not in self.elsewhere:
                yield StateLocation(self.path, self.module._buffers, name)
        for name, parameter in self.module._parameters.items():
            # Only the optimizer changes trained parameters.
            if name not in self.elsewhere and parameter is not None and not parameter.requires_grad:
                yield StateLocation(self.path, self.module._parameters, name)
        for name in self.tensors:
            yield StateLocation(self.path, vars(self.module), name)


def state_owners(layers: Iterable[tuple[str, nn.Module]]) -> list[StateOwner]:
    """Return the modules that hold the state of some layers, given by name, each once.

    For layers of a `ModelStage` these are the modules of the model that own the tensors of the layers.
    """
    by_module: dict[nn.Module, StateOwner] = {}
    for name, layer in layers:
        for owner in _owners(name, layer):
            first = by_module.get(owner.module, owner)
            # What belongs to one of the layers belongs to all of them.
            by_module[owner.module] = replace(first, elsewhere=first.elsewhere & owner.elsewhere)
    return list(by_module.values())


def collecting_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the batch normalizations in `module` whose running statistics training changes."""
    parts = module.holders if isinstance(module, ModelStage) else module.modules()
    norms = (part for part in parts if isinstance(part, _BatchNorm))
    return [norm for norm in norms if norm.training and norm.running_mean is not None]


def statistics_bytes(module: nn.Module) -> int:
    """Return the bytes held all through training to collect running statistics of the batch normalizations in `module`.

    For every channel these are a mean and a variance of the running micro-batch, in the precision of the running
    statistics, and the sums. A layer that is called several times in a forward takes them as often; once is counted.
    """
    means = [layer.running_mean for layer in collecting_layers(module) if layer.running_mean is not None]
    return sum(2 * mean.nbytes + _SUM_BYTES * mean.numel() for mean in means)


def _owners(name: str, layer: nn.Module) -> Iterator[StateOwner]:
    if not isinstance(layer, ModelStage):
        for path, module in layer.named_modules(prefix=name):
            yield StateOwner.of(path, module)
        return
    held: dict[str, set[str]] = {path: set() for path in layer.running}
    for tensors in (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)):
        for full, _ in tensors:
            path, _, last = full.rpartition(".")
            held.setdefault(path, set()).add(last)
    for path, names in held.items():
        module = layer.model.get_submodule(path)
        yield StateOwner.of(path, module, frozenset({*module._parameters, *module._buffers} - names))
