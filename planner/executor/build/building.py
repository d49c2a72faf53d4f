"""Build the layers of a stage, with the same initial parameters as `seed_process(S); build_model()`."""

import contextlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.balance import Balance
from planner.core.values.units import pluralize
from planner.executor.build.own_stage import BuildError, build_with_values, to_meta
from planner.executor.run.shapes import chain_shapes
from planner.model.chain import Chain, Layer, chain_digest, chain_from_outline, chain_of_children, refuse_sparse
from planner.model.closures import other_reachable_tensors
from planner.model.copying import copy_module
from planner.model.ghosts import Ghost, ghost_like
from planner.model.growth import SIZES
from planner.model.lean import NoMetaBranches, StrictOperators, allocate_parameters
from planner.model.load import LoadedModel
from planner.model.module_tensors import (
    attribute_tensors,
    copy_attributes,
    move_attribute_tensors,
    named_tensors,
    replace_tensors,
)
from planner.model.outline import ModelOutline
from planner.model.precision import convert_in_place
from planner.model.seeding import example_mini_batch, seed_process, seeded_draws

_SMALL_BYTES = 20_000_000
"""Largest size of the parameters of a model that may be built as a whole."""


class StageRange(NamedTuple):
    """Stage: the layers `first` to `end - 1` of the model's sequence of layers (the chain)."""

    first: int
    end: int
    apart: bool = False
    """True if `layers_of` must return every layer as a separate module."""

    def layers_of(self, chain: Chain) -> tuple[Layer, ...]:
        """Return the layers of this stage.

        If the model is not a plain `nn.Sequential` and `apart` is false, one module contains all these layers.
        """
        if chain.outline is None or self.apart:
            return chain.layers[self.first : self.end]
        return (Layer(chain.names[self.first], chain.stage(self.first, self.end)),)


def build_structure(loaded: LoadedModel) -> Chain:
    """Return the whole chain on the meta device, with names and shapes but without memory.

    If `build_model` or `forward` reads elements of tensors, or their `is_meta`, the whole model is in memory until this
    function returns.

    Raises:
        ModelError: The model cannot be built.
    """
    full: nn.Module | None = None  # the model with values
    try:
        with torch.device("meta"), StrictOperators(), NoMetaBranches():  # type: ignore[no-untyped-call]
            model = loaded.build()
    except Exception:  # the construction may read values or `is_meta`; an error in the user's code occurs here again
        model = full = _built(loaded)
    refuse_sparse(model)
    if any(not tensor.is_meta for tensor in _all_tensors(model)):
        # Copy the model and replace every tensor in the copy, because the file may return the same model each time.
        # Tied tensors stay tied.
        model = copy_module(model, {id(tensor): _emptied(tensor) for tensor in _all_tensors(model)})
    model = convert_in_place(model, loaded.precision)
    try:
        return loaded.chain(model)
    except ModelError:  # the forward may read values; an error in the user's code occurs here again
        full = convert_in_place(_built(loaded) if full is None else full, loaded.precision)
        outline = loaded.chain(full).outline
        if outline is None:
            raise
        return chain_from_outline(outline, model)


def _built(loaded: LoadedModel) -> nn.Module:
    with seeded_draws(0):  # the seed of `find_chain`: random initial values may decide shapes
        return loaded.build()


def check_buildable(loaded: LoadedModel) -> None:
    """Check that the structure of the model and the shapes at its boundaries can be found.

    Raises:
        ModelError: The structure or the shapes cannot be found.
    """
    inputs = example_mini_batch(loaded, SIZES[0], seed=0, step=0).inputs
    chain_shapes(build_structure(loaded), inputs, precision=loaded.precision, device=torch.device("cpu"))


def check_same_model(balance: Balance, loaded: LoadedModel, chain: Chain) -> None:
    """Check that the model is the planned one.

    Args:
        balance: Plan as written in `balance.yaml`.
        loaded: Loaded model file.
        chain: Chain of the model.

    Raises:
        ModelError: Names of layers or the model's digest differ from those in the plan.
    """
    names, planned = chain.names, tuple(name for stage in balance.stages for name in stage.layers)
    changed = [(a, b) for a, b in zip(planned, names, strict=False) if a != b]
    if planned != names:
        what = f'it has the layer "{changed[0][1]}" instead of "{changed[0][0]}"' if changed else ""
        counts = f"it has {pluralize(len(names), 'layer')}, the plan has {len(planned)}"
        raise ModelError(
            f"the model is not the one that was planned: {what or counts}",
            hint="profile, solve and emit again",
        )
    digest = chain_digest(chain, loaded.settings, balance.dtype)
    if balance.model.digest and digest != balance.model.digest:
        raise ModelError(
            f"the model has changed since it was planned (digest {digest[:19]}…, planned {balance.model.digest[:19]}…)",
            hint=f"`gpipe-plan check --model {shlex.quote(loaded.source)}` names the layers that changed; "
            "profile, solve and emit again",
        )


def build_stages(
    loaded: LoadedModel,
    chain: Chain,
    stages: Sequence[StageRange],
    *,
    seed: int,
    device: torch.device,
    may_build_whole: bool = False,
) -> list[tuple[Layer, ...]]:
    """Build the layers of some stages, with the initial values of the whole model. Shared parameters are one tensor.

    Args:
        loaded: Loaded model file.
        chain: Chain of the model.
        stages: Ranges of the stages.
        seed: Seed of the initial values.
        device: Device of the layers.
        may_build_whole: True to build a small model as a whole, which takes less time but more memory.

    Returns:
        Layers of each stage.
    """
    outline = chain.outline

    def wanted(model: nn.Module) -> list[Tensor]:
        if outline is None:
            layers = chain_of_children(model).layers
            return _reachable_tensors([layer.module for s in stages for layer in layers[s.first : s.end]])
        needed = _needed_tensors(outline, model, stages)
        return [*needed, *other_reachable_tensors([model], needed)]

    is_small = sum(parameter.nbytes for parameter in chain.model.parameters()) <= _SMALL_BYTES
    model = _build_whole(loaded, seed) if may_build_whole and is_small else _build_only_wanted(loaded, wanted, seed)
    model = convert_in_place(model, loaded.precision)
    if outline is not None:
        needed = _needed_tensors(outline, model, stages)
        needed_ids = {id(tensor) for tensor in needed}
        _move_in_place(other_reachable_tensors([model], needed), device)
        keep_only(model, lambda tensor: _on(tensor, device) if id(tensor) in needed_ids else None, device)
        move_attribute_tensors(model, lambda tensor: _moved_or_placeholder(tensor, needed_ids, device))
    instances = _instances_for_stages(model, chain, len(stages))
    chains = [chain_of_children(own) if outline is None else chain_from_outline(outline, own) for own in instances]
    layers = [stage.layers_of(own) for stage, own in zip(stages, chains, strict=True)]
    if outline is None:
        # Move all layers at once, so that layers that share a tensor still share it.
        together = nn.ModuleList(layer.module for of_stage in layers for layer in of_stage).to(device)
        _move_in_place(other_reachable_tensors(together, together.parameters()), device)
    return layers


def _build_only_wanted(loaded: LoadedModel, wanted: Callable[[nn.Module], list[Tensor]], seed: int) -> nn.Module:
    if not loaded.is_without_values:
        with contextlib.suppress(BuildError):
            return build_with_values(loaded.build, wanted, seed=seed)
    return _build_whole(loaded, seed)


def _build_whole(loaded: LoadedModel, seed: int) -> nn.Module:
    seed_process(seed)
    model = loaded.build()
    if loaded.is_without_values:
        allocate_parameters([model], model, torch.device("cpu"), random=False)
    return model


def keep_only(model: nn.Module, keep: Callable[[Tensor], Tensor | None], device: torch.device) -> None:
    """Replace each parameter and buffer of a model by `keep(tensor)`, or by a placeholder without memory.

    Args:
        model: Model that is changed in place.
        keep: Function that returns the tensor to use, or None for a placeholder.
        device: Device that the placeholders report.
    """
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}

    def kept_or_placeholder(tensor: Tensor) -> Tensor:
        kept = keep(tensor)
        return ghost_like(tensor, device, names[id(tensor)]) if kept is None else kept

    replace_tensors(model, kept_or_placeholder)


def _needed_tensors(outline: ModelOutline, model: nn.Module, stages: Sequence[StageRange]) -> list[Tensor]:
    needed = (names for stage in stages for names in outline.model_tensors[stage.first : stage.end])
    names = frozenset[str]().union(*needed)
    return [tensor for name, tensor in named_tensors(model) if name in names]


def _emptied(tensor: Tensor) -> Tensor:
    empty = to_meta(tensor)
    copy_attributes(tensor, empty)
    return empty


def accumulated_leaf_ids(tensors: Iterable[Tensor]) -> set[int]:
    """Return the `id()` of each leaf tensor to which a backward of `tensors` adds a gradient."""
    tensors = list(tensors)
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}
    waiting, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        leaves |= set() if variable is None else {id(variable)}
        waiting += [below for below, _ in node.next_functions]
    return leaves


def _moved_or_placeholder(tensor: Tensor, available_ids: set[int], device: torch.device) -> Tensor:
    if tensor.is_leaf or accumulated_leaf_ids([tensor]) <= available_ids:
        return tensor.to(device)
    return ghost_like(tensor, device, "a tensor computed from parameters of another stage")


def _instances_for_stages(model: nn.Module, chain: Chain, count: int) -> list[nn.Module]:
    """Return a model object for each stage. The objects share all tensors that no forward changes."""
    if chain.outline is None:
        return [model] * count
    # Every stage runs the code of `forward` that is outside submodules. If stages shared the state that this code
    # changes, each micro-batch would change it several times.
    changed = {state.name for state in chain.outline.recording.states}
    own = {id(tensor) for name, tensor in named_tensors(model) if name in changed and not tensor.requires_grad}
    tensors = [tensor for tensor in _reachable_tensors([model]) if id(tensor) not in own or isinstance(tensor, Ghost)]
    return [model, *(copy_module(model, {id(tensor): tensor for tensor in tensors}) for _ in range(count - 1))]


def _reachable_tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    held = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [*held, *other_reachable_tensors(modules, held)]


def _move_in_place(tensors: Sequence[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        # Closures refer to these objects, so only their data are replaced. A meta tensor of the user has none: the base
        # of an ensemble, whose weights `functional_call` replaces.
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)


def _all_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers(), *attribute_tensors(module)]
