"""The layers of one stage with their initial parameters, equal to those of `torch.manual_seed(S); build_model()`."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.core.errors import ModelError
from planner.executor.own_stage import BuildError, build_only, emptied
from planner.model.chain import Chain, Layer, chain_of
from planner.model.load import LoadedModel
from planner.model.precision import convert

__all__ = ["build_layers", "build_structure"]


def build_structure(loaded: LoadedModel) -> Chain:
    """The whole chain on the meta device: names and shapes, no memory (while it is built, where that needs values).

    Raises:
        ModelError: The model cannot be built.
    """
    try:
        with torch.device("meta"):
            model = loaded.build()
    except Exception:  # construction that depends on values; an error of the user's comes again
        model = loaded.build()
    if any(not tensor.is_meta for tensor in _all_tensors(model)):
        # A copy in which every tensor is replaced: a finished model stays as it is, and what is tied stays tied.
        model = copy.deepcopy(model, {id(tensor): emptied(tensor) for tensor in _all_tensors(model)})
    return chain_of(convert(model, loaded.precision))


def build_layers(loaded: LoadedModel, names: Sequence[str], *, seed: int, device: torch.device) -> tuple[Layer, ...]:
    """The layers called `names` on `device`; no other layer's parameters take memory.

    A model whose construction cannot be followed (it depends on values, say) is built whole, and the others dropped.

    Raises:
        ModelError: The model has no such layer.
    """

    def wanted(model: nn.Module) -> list[Tensor]:
        return [tensor for layer in _select(model, names) for tensor in _all_tensors(layer.module)]

    try:
        model = build_only(loaded.build, wanted, seed=seed)
    except BuildError:
        torch.manual_seed(seed)
        model = loaded.build()
    selected = [Layer(layer.name, layer.module.to(device)) for layer in _select(model, names)]
    return tuple(Layer(layer.name, convert(layer.module, loaded.precision)) for layer in selected)


def _select(model: nn.Module, names: Sequence[str]) -> list[Layer]:
    by_name = {layer.name: layer for layer in chain_of(model).layers}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ModelError(f'the model has no layer "{missing[0]}"', hint="profile, solve and emit again")
    return [by_name[name] for name in names]


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes, also in lists and dicts."""
    plain = [vars(part) for part in module.modules()]
    attributes = [value for held in plain for name, value in held.items() if name not in _HELD_BY_TORCH]
    loose = [leaf for leaf in tree_flatten(attributes)[0] if isinstance(leaf, Tensor)]
    return [*module.parameters(), *module.buffers(), *loose]


_HELD_BY_TORCH = ("_parameters", "_buffers", "_modules")
