"""A model as a chain of layers: layer l maps what crosses boundary l-1 to what crosses boundary l.

What crosses a boundary is any nest of tuples, lists and dicts of tensors. For an `nn.Sequential` a layer is a child,
nested ones flattened; the layer's name is its module path.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from planner.core.errors import ModelError
from planner.core.precision import Precision
from planner.core.profile import Setting

__all__ = ["Chain", "Layer", "chain_digest", "chain_of", "run_layers", "tied_parameters"]


@dataclass(frozen=True)
class Layer:
    """One layer: `name` is its path in the model."""

    name: str
    module: nn.Module

    def parameter_names(self) -> dict[str, nn.Parameter]:
        """Full parameter name in the model to parameter."""
        return {f"{self.name}.{name}": parameter for name, parameter in self.module.named_parameters()}


@dataclass(frozen=True)
class Chain:
    """The layers of a model in execution order."""

    layers: tuple[Layer, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Module path of every layer."""
        return tuple(layer.name for layer in self.layers)


def chain_of(model: nn.Module) -> Chain:
    """The chain of an `nn.Sequential`.

    Raises:
        ModelError: The model is of another kind, or empty.
    """
    if not _is_plain_sequential(model):
        raise ModelError(
            f"the model is a {type(model).__name__}; only an nn.Sequential can be cut so far",
            hint="write its forward as an nn.Sequential of layers (tuples of tensors may pass between them)",
        )
    layers = tuple(_flatten(model, ""))
    lazy = [layer.name for layer in layers if any(map(is_lazy, layer.module.parameters()))]
    if lazy:
        raise ModelError(
            f'layer "{lazy[0]}" has parameters without a shape before the model has run (a lazy module)',
            hint="give its size, or run the model once in `build_model`",
        )
    if not layers:
        raise ModelError("the model is an empty nn.Sequential: there is nothing to plan")
    return Chain(layers)


def run_layers(layers: Sequence[nn.Module], value: Any) -> Any:
    """`value` through `layers`, as `nn.Sequential` does it: no reference to what lies between is kept."""
    for layer in layers:
        value = layer(value)
    return value


def tied_parameters(layers: Sequence[Layer]) -> dict[str, tuple[str, ...]]:
    """Parameter name to the names in other layers that share its storage; only those that share."""
    by_storage: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.parameter_names().items():
            by_storage.setdefault(_storage_key(parameter), []).append((index, name))
    tied = {}
    for owners in by_storage.values():
        for index, name in owners:
            others = tuple(other for other_index, other in owners if other_index != index)
            if others:
                tied[name] = others
    return tied


def chain_digest(chain: Chain, settings: dict[str, Setting], precision: Precision = "") -> str:
    """`sha256:…` over names, classes, parameters and buffers (shapes, dtypes, trainable or not), settings, precision.

    Weights do not count, so it can be taken on the meta device.
    """
    content: dict[str, Any] = {"settings": settings, "layers": [_described(layer) for layer in chain.layers]}
    if precision:
        content["dtype"] = precision
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _described(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "class": type(layer.module).__qualname__,
        # Functions and objects show where they lie in memory, which is another place in the next process.
        "repr": re.sub(r" at 0x[0-9a-f]+", "", repr(layer.module)),
        "parameters": [_tensor(name, p) for name, p in layer.module.named_parameters()],
        "buffers": [_tensor(name, b) for name, b in layer.module.named_buffers()],
    }


def _tensor(name: str, tensor: Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _is_plain_sequential(module: nn.Module) -> bool:
    # A subclass with a forward of its own does something else; hooks on a container would be lost by flattening.
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked


def _flatten(container: nn.Module, prefix: str) -> Iterator[Layer]:
    for name, child in container._modules.items():
        if child is None:
            continue
        if _is_plain_sequential(child) and len(child._modules):
            yield from _flatten(child, f"{prefix}{name}.")
        else:
            yield Layer(f"{prefix}{name}", child)


def _storage_key(parameter: nn.Parameter) -> int:
    # Tensors on the meta device have no memory to compare: there only the very same tensor counts as tied.
    return id(parameter) if parameter.is_meta else parameter.untyped_storage().data_ptr() or id(parameter)
