"""The layers of one stage with their initial parameters, equal to those of `torch.manual_seed(S); build_model()`."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.balance import Balance
from planner.core.values.units import counted
from planner.executor.build.own_stage import BuildError, build_only, emptied
from planner.model.chain import Chain, Layer, chain_digest, outlined
from planner.model.ghosts import absent
from planner.model.held import loose_tensors, move_loose_tensors, replace_tensors
from planner.model.load import LoadedModel
from planner.model.outline import Outline
from planner.model.precision import convert

__all__ = ["StageRange", "build_layers", "build_stages", "build_structure", "check_same_model"]


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
    full = model
    if any(not tensor.is_meta for tensor in _all_tensors(model)):
        # A copy in which every tensor is replaced: a finished model stays as it is, and what is tied stays tied.
        model = copy.deepcopy(model, {id(tensor): emptied(tensor) for tensor in _all_tensors(model)})
    model = convert(model, loaded.precision)
    try:
        return loaded.chain(model)
    except ModelError:  # what can be cut only where it runs on values; an error of the user's comes again
        full = convert(loaded.build() if full is model else full, loaded.precision)
        outline = loaded.chain(full).outline
        if outline is None:
            raise
        return outlined(outline, model)


def check_same_model(balance: Balance, loaded: LoadedModel, chain: Chain) -> None:
    """Refuses to run another model than the one that was planned.

    Args:
        balance: The balance configuration.
        loaded: The model, with the settings that it is built with.
        chain: Its layers.

    Raises:
        ModelError: Names of layers, or the digest, are not those of the plan.
    """
    names, planned = chain.names, tuple(name for stage in balance.stages for name in stage.layers)
    changed = [(a, b) for a, b in zip(planned, names, strict=False) if a != b]
    if planned != names:
        what = f'"{changed[0][1]}" stands where "{changed[0][0]}" was' if changed else counted(len(names), "layer")
        raise ModelError(
            f"the model is not the one that was planned: {what} (planned were {counted(len(planned), 'layer')})",
            hint="profile, solve and emit again",
        )
    digest = chain_digest(chain, loaded.settings, balance.dtype)
    if balance.model.digest and digest != balance.model.digest:
        raise ModelError(
            f"the model has changed since it was planned (digest {digest[:19]}…, planned {balance.model.digest[:19]}…)",
            hint="profile, solve and emit again",
        )


def build_layers(
    loaded: LoadedModel, chain: Chain, first: int, end: int, *, seed: int, device: torch.device, apart: bool = False
) -> tuple[Layer, ...]:
    """Layers `first`..`end - 1` of `chain` on `device`, as `build_stages` builds those of one stage."""
    (layers,) = build_stages(loaded, chain, [StageRange(first, end, apart)], seed=seed, device=device)
    return layers


class StageRange(NamedTuple):
    """Layers `first`..`end - 1` of a chain."""

    first: int
    end: int
    apart: bool = False
    """Whether each layer must be a module of its own: else a model with an outline gives all in one."""


def build_stages(
    loaded: LoadedModel, chain: Chain, stages: Sequence[StageRange], *, seed: int, device: torch.device
) -> list[tuple[Layer, ...]]:
    """The layers of some stages of `chain` on `device`; no other layer's parameters take memory.

    What two of the stages share they share here, too. A model whose construction cannot be followed (it depends on
    values, say) is built whole, and the others dropped.

    Args:
        loaded: The model.
        chain: Its chain, on the meta device.
        stages: Which.
        seed: Of the initial parameters.
        device: Where to.
    """

    def wanted(model: nn.Module) -> list[Tensor]:
        if chain.outline is None:
            layers = loaded.chain(model).layers
            return [t for s in stages for layer in layers[s.first : s.end] for t in _all_tensors(layer.module)]
        return [*_held_by(chain.outline, model, stages).values(), *loose_tensors(model)]

    try:
        model = build_only(loaded.build, wanted, seed=seed)
    except BuildError:
        torch.manual_seed(seed)
        model = loaded.build()
    model = convert(model, loaded.precision)
    if chain.outline is None:
        layers = loaded.chain(model).layers
        # Moved together, what several layers share stays shared.
        nn.ModuleList(layer.module for s in stages for layer in layers[s.first : s.end]).to(device)
        return [layers[stage.first : stage.end] for stage in stages]
    _move(model, set(_held_by(chain.outline, model, stages)), device)
    built = outlined(chain.outline, model)
    return [
        built.layers[stage.first : stage.end]
        if stage.apart
        else (Layer(chain.names[stage.first], built.stage(stage.first, stage.end)),)
        for stage in stages
    ]


def _held_by(outline: Outline, model: nn.Module, stages: Sequence[StageRange]) -> dict[str, Tensor]:
    """What the layers of `stages` need, by name."""
    names = {name for stage in stages for layer in outline.holds[stage.first : stage.end] for name in layer}
    return {name: tensor for name, tensor in _named(model) if name in names}


def _move(model: nn.Module, held: set[str], device: torch.device) -> None:
    """Puts what is held and what is no parameter on `device`, and absent ghosts in place of all else."""
    names = {id(tensor): name for name, tensor in reversed(_named(model))}
    kept = {id(tensor) for name, tensor in _named(model) if name in held}

    def placed(tensor: Tensor) -> Tensor:
        return _on(tensor, device) if id(tensor) in kept else absent(tensor, device, names[id(tensor)])

    replace_tensors(model, placed)
    move_loose_tensors(model, lambda tensor: tensor.to(device))


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    return [*module.parameters(), *module.buffers(), *loose_tensors(module)]
