"""Represent a model as a chain of layers: each layer maps the tensors at one boundary to those at the next boundary.

In an `nn.Sequential`, each child is a layer (nested Sequentials are flattened). The name of a layer is its module path,
and any nest of tuples, lists and dicts of tensors may cross a boundary. Any other model is cut according to its outline
(`planner.model.outline`). A layer is then a part of the model's forward, named after the largest module in that part,
and a tuple of tensors crosses each boundary.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from planner.core.errors import ModelError
from planner.core.values.precision import Precision
from planner.core.values.profile import Granularity, Setting
from planner.model.attributes import value_at
from planner.model.calling import is_compiled
from planner.model.closures import other_reachable_tensors
from planner.model.ghosts import memory_key, storage_key
from planner.model.growth import SIZES
from planner.model.module_tensors import attribute_tensors
from planner.model.nests import tensors_in
from planner.model.outline import ModelOutline, outline_of
from planner.model.recorder import record
from planner.model.refusals import sparse_gradient_error
from planner.model.stage import ModelStage, get_or_create_module


@dataclass(frozen=True)
class Layer:
    """Layer of the chain, named by the path of its largest module; a second layer of this name has the suffix `#2`."""

    name: str
    module: nn.Module

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return the layer's parameters by their names in the model."""
        return {f"{self._prefix}{name}": parameter for name, parameter in self.module.named_parameters()}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Return the layer's buffers by their names in the model."""
        return {f"{self._prefix}{name}": buffer for name, buffer in self.module.named_buffers()}

    @property
    def buffer_bytes(self) -> int:
        """Memory of the layer's buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self.module.buffers())

    @property
    def _prefix(self) -> str:
        return "" if isinstance(self.module, ModelStage) else f"{self.name}."


@dataclass(frozen=True)
class Chain:
    """Layers of a model in execution order."""

    layers: tuple[Layer, ...]
    model: nn.Module
    outline: ModelOutline | None = None
    """Outline of a model that is not a Sequential."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def boundary_names(self) -> tuple[str, ...]:
        """Names of the boundaries, as in the option `uncut`: each has the name of the layer before it."""
        return self.names[:-1] if self.outline is None else self.outline.boundary_names

    def modules(self, layer: int) -> tuple[str, ...]:
        """Return the paths of a layer's modules in execution order; empty if the layer is a single module."""
        name = self.layers[layer].name
        modules = (name,) if self.outline is None else self.outline.modules[layer]
        return () if modules == (name,) else modules

    def stage(self, first: int, end: int) -> nn.Module:
        """Return layers `first` to `end - 1` as one module with the model's submodules; parameters keep their names.

        The first stage takes the model's inputs, and the last stage returns the model's output. Other stages take and
        return the tensors that cross their boundaries.
        """
        if self.outline is None:
            return _Layers(self.layers[first:end])
        return ModelStage(self.outline, self.model, first, end)


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._layers = [layer.module for layer in layers]
        for layer in layers:
            register_at_path(self, layer.name, layer.module)

    def forward(self, value: Any) -> Any:
        return run_layers(self._layers, value)


def chain_of(
    model: nn.Module,
    example_inputs: Callable[[int], Any] | None = None,
    granularity: Granularity = "coarse",
    *,
    loss_of: Callable[[int], Callable[[Any], object]] | None = None,
    uncut: Sequence[str] = (),
) -> Chain:
    """Return the chain of layers of a model.

    Args:
        model: The model.
        example_inputs: Function from a number of samples to inputs; only an `nn.Sequential` needs none.
        granularity: `coarse` for about one layer per block, `fine` for parts of blocks as well. A Sequential is always
            cut into its children.
        loss_of: Function from a number of samples to a function that computes the loss from the model's output. If it
            is None, all outputs count as read by the loss.
        uncut: Names of layers after which the model is not cut.

    Raises:
        ModelError: The model is empty, has parameters without a shape, fails when it runs, or cannot be cut anywhere.
    """
    lazy = [path for path, module in model.named_modules() if any(map(is_lazy, module._parameters.values()))]
    if lazy:
        raise ModelError(
            f'layer "{lazy[0]}" has parameters without a shape before the model has run (a lazy module)',
            hint="give its size, or run the model once in `build_model`",
        )
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f'"{scripted[0]}" is a TorchScript module (`torch.jit.script` or `trace`): it hides its layers and tensors',
            hint="leave the module as plain Python: `torch.jit.script` only after training",
        )
    if is_compiled(model) and not _is_plain_sequential(model):
        raise ModelError(
            "the model is compiled as a whole by `torch.compile`, which hides its layers",
            hint="compile its blocks instead, or leave `torch.compile` out",
        )
    refuse_sparse(model)
    # A Sequential with children that must stay in one layer is cut like any other module.
    if _is_plain_sequential(model) and not uncut and not _shares_state(model, example_inputs):
        chain = chain_of_children(model)
        if not chain.layers:
            raise ModelError("the model is an empty nn.Sequential: there is nothing to plan")
        return chain
    if example_inputs is None:
        raise ModelError(
            f"the model is a {type(model).__name__}; to cut it, its inputs must be known",
            hint="define `example_batch(batch_size)`",
        )
    return chain_from_outline(outline_of(model, example_inputs, granularity, loss_of, uncut=uncut), model)


def chain_of_children(model: nn.Module) -> Chain:
    """Return the chain of an `nn.Sequential`: its children, and those of each nested `nn.Sequential`."""
    return Chain(tuple(_flatten(model, "")), model)


def chain_from_outline(outline: ModelOutline, model: nn.Module) -> Chain:
    """Return the layers of `model` as a chain. `outline` may come from another instance of the same model."""
    stages = (ModelStage(outline, model, n, n + 1) for n in range(len(outline.names)))
    return Chain(tuple(map(Layer, outline.names, stages)), model, outline)


def register_at_path(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` in `root` under its dotted path in the model, so that parameters keep their names.

    Args:
        root: Module that becomes an ancestor of `module`.
        name: Dotted path.
        module: The module.
    """
    *path, last = name.split(".")
    get_or_create_module(root, path)._modules[last] = module


def run_layers(layers: Sequence[nn.Module], value: Any) -> Any:
    """Run `layers` one after another on `value` and return the result."""
    for layer in layers:
        value = layer(value)
    return value


def shared_parameters(layers: Sequence[Layer]) -> list[list[tuple[int, str]]]:
    """Return the parameters that several layers share: for each, pairs of layer index and name.

    Views of different parts of one storage do not count as shared.
    """
    by_memory: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.parameters_by_name().items():
            by_memory.setdefault(memory_key(parameter), []).append((index, name))
    return [owners for owners in by_memory.values() if len({index for index, _ in owners}) > 1]


def tied_parameters(layers: Sequence[Layer]) -> dict[str, tuple[str, ...]]:
    """Return, for each name of a tied parameter, the names that the parameter has in other layers.

    A name that does not begin with the name of its layer is replaced by the layer's name.
    """
    tied: dict[str, tuple[str, ...]] = {}
    for owners in shared_parameters(layers):
        for index, name in owners:
            elsewhere = [(layers[n].name, full) for n, full in owners if n != index]
            names = [full if full.startswith(f"{layer}.") else layer for layer, full in elsewhere]
            tied[name] = tuple(dict.fromkeys((*tied.get(name, ()), *names)))
    return tied


def chain_digest(chain: Chain, settings: dict[str, Setting], precision: Precision = "") -> str:
    """Return a digest `sha256:…` of a chain, without the values of its tensors.

    The digest covers names, classes, parameters and buffers (shape, dtype, trainability), settings and precision. The
    model may be on the meta device.

    Args:
        chain: The chain.
        settings: Settings with which the model was built.
        precision: Precision in which the model runs.
    """
    content: dict[str, Any] = {"settings": settings, "layers": [_described(layer) for layer in chain.layers]}
    if chain.outline is not None:
        content |= {"model": _described(Layer("", chain.model)), "crossings": chain.outline.crossing_shapes}
    if precision:
        content["dtype"] = precision
    return json_digest(content)


def json_digest(content: Any) -> str:
    """Return a digest `sha256:…` of `content` as JSON. Values without a JSON form are converted by `str`."""
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def without_addresses(text: str) -> str:
    """Remove memory addresses from a printed module, because they differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _described(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "class": type(layer.module).__qualname__,
        "repr": without_addresses(_printed(layer.module)),
        "parameters": [_tensor(name, p) for name, p in layer.module.named_parameters()],
        "buffers": [_tensor(name, b) for name, b in layer.module.named_buffers()],
    }


def _printed(module: nn.Module) -> str:
    """Return the printed module, or only class names if a submodule has its own `__repr__`, which may print values."""
    own = any(
        type(part).__module__.startswith("torch.ao.")
        or (type(part).__repr__ is not nn.Module.__repr__ and not type(part).__module__.startswith("torch."))
        for part in module.modules()
    )
    if not own:
        # Containers of parameters also print where these are. `_described` lists the parameters.
        return re.sub(r"Parameter containing: \[.*?\]", "Parameter", repr(module))
    return "\n".join(f"{path}: {type(part).__qualname__}" for path, part in module.named_modules())


def _tensor(name: str, tensor: Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _is_plain_sequential(module: nn.Module) -> bool:
    # A subclass with its own forward may do something else. Flattening would lose the hooks of a container.
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked


def refuse_sparse(model: nn.Module) -> None:
    """Raise a `ModelError` if the model has a sparse tensor or a layer with sparse gradients."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise sparse_gradient_error(f'layer "{path}"')
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in [*named, *(("an attribute", tensor) for tensor in attribute_tensors(model))]:
        if tensor.layout != torch.strided:
            raise ModelError(
                f'"{name}" is a sparse tensor ({tensor.layout}), which cannot be measured, sent or saved',
                hint="use a dense one (`to_dense()`), or indices and values in two buffers, and `index_add`",
            )


def _shares_state(model: nn.Module, example_inputs: Callable[[int], Any] | None) -> bool:
    """Return True if a forward changes a tensor that several layers of a Sequential use, or if this is unknown."""
    layers = [layer.module for layer in _flatten(model, "")]
    owned = [
        {storage_key(t) for t in (*m.parameters(), *m.buffers(), *other_reachable_tensors([m], ()))} for m in layers
    ]
    shared = {key for key, count in Counter(key for keys in owned for key in keys).items() if count > 1}
    if example_inputs is None or not shared:
        return False
    try:
        recording = record(model, (example_inputs(SIZES[0]),), ghosts=True)
    except Exception:  # the forward reads values that this instance may lack; the user's own errors are raised later
        return not shared <= set(map(storage_key, model.parameters()))
    names = [layer.name for layer in _flatten(model, "")]
    calls = [call for call in recording.calls if call.path in names]
    # An object that several layers hold is recorded under its first path only.
    places = [state.attribute for state in recording.states if state.attribute is not None]
    if any(shared & set(map(storage_key, tensors_in(value_at(model, *place)))) for place in places):
        return True
    return any(not any(c.enter < s.first and s.last <= c.exit for c in calls) for s in recording.states)


def _flatten(container: nn.Module, prefix: str) -> Iterator[Layer]:
    for name, child in container._modules.items():
        if child is None:
            continue
        if _is_plain_sequential(child) and len(child._modules):
            yield from _flatten(child, f"{prefix}{name}.")
        else:
            yield Layer(f"{prefix}{name}", child)
