"""The layers of one stage with their initial parameters, equal to those of `torch.manual_seed(S); build_model()`."""

import contextlib
import copy
import shlex
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.balance import Balance
from planner.core.values.units import counted
from planner.executor.build.own_stage import BuildError, build_only, emptied
from planner.executor.run.shapes import shapes_of
from planner.model.chain import Chain, Layer, chain_digest, outlined, refuse_sparse
from planner.model.closures import outlying_tensors
from planner.model.ghosts import Ghost, absent
from planner.model.growth import SIZES
from planner.model.held import copy_attributes, loose_tensors, move_loose_tensors, named_tensors, replace_tensors
from planner.model.lean import fill
from planner.model.load import LoadedModel
from planner.model.precision import convert


class StageRange(NamedTuple):
    """Layers `first`..`end - 1` of a chain."""

    first: int
    end: int
    apart: bool = False
    """Whether each layer must be a module of its own: else a model with an outline gives all in one."""

    def of(self, chain: Chain) -> tuple[Layer, ...]:
        """These layers of a chain."""
        if chain.outline is None or self.apart:
            return chain.layers[self.first : self.end]
        return (Layer(chain.names[self.first], chain.stage(self.first, self.end)),)


def build_structure(loaded: LoadedModel) -> Chain:
    """The whole chain on the meta device: names and shapes, no memory (while it is built, where that needs values).

    Raises:
        ModelError: The model cannot be built.
    """
    full: nn.Module | None = None  # with values
    try:
        with torch.device("meta"):
            model = loaded.build()
    except Exception:  # construction that depends on values; an error of the user's comes again
        model = full = loaded.build()
    refuse_sparse(model)
    if any(not tensor.is_meta for tensor in _all_tensors(model)):
        # A copy in which every tensor is replaced: a finished model stays as it is, and what is tied stays tied.
        model = copy.deepcopy(model, {id(tensor): _emptied(tensor) for tensor in _all_tensors(model)})
    model = convert(model, loaded.precision)
    try:
        return loaded.chain(model)
    except ModelError:  # what can be cut only where it runs on values; an error of the user's comes again
        full = convert(full or loaded.build(), loaded.precision)
        outline = loaded.chain(full).outline
        if outline is None:
            raise
        return outlined(outline, model)


def check_buildable(loaded: LoadedModel) -> None:
    """Find the stages' structure and shapes as every rank does when a run starts.

    Raises:
        ModelError: They cannot be found, so no rank could start.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = loaded.example_batch(SIZES[0]).inputs
    shapes_of(build_structure(loaded), inputs, precision=loaded.precision, device=torch.device("cpu"))


def check_same_model(balance: Balance, loaded: LoadedModel, chain: Chain) -> None:
    """Refuses to run another model than the one that was planned; `chain` is that of `loaded`.

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
            hint=f"`gpipe-plan check --model {shlex.quote(loaded.source)}` names the layers that changed; "
            "profile, solve and emit again",
        )


def build_stages(
    loaded: LoadedModel, chain: Chain, stages: Sequence[StageRange], *, seed: int, device: torch.device
) -> list[tuple[Layer, ...]]:
    """The layers of some stages of `chain` on `device`, with the values that the seed gives them in the whole model.

    No other layer's parameters take memory. What two of the stages share they share here, too. A model whose
    construction cannot be followed (it depends on values, say) is built whole, and the others dropped.
    """

    def wanted(model: nn.Module) -> list[Tensor]:
        if chain.outline is None:
            layers = loaded.chain(model).layers
            return _with_outlying([layer.module for s in stages for layer in layers[s.first : s.end]])
        held = _held_by(chain, model, stages)
        return [*held, *outlying_tensors([model], held)]

    model = _build_parts(loaded, wanted, seed)
    model = convert(model, loaded.precision)
    if chain.outline is not None:
        held = {id(tensor) for tensor in _held_by(chain, model, stages)}
        _move(outlying_tensors([model], _held_by(chain, model, stages)), device)
        keep_only(model, lambda tensor: _on(tensor, device) if id(tensor) in held else None, device)
        move_loose_tensors(model, lambda tensor: _with_its_parameters(tensor, held, device))
    built = [like(chain, loaded, each) for each in _instances(model, chain, len(stages))]
    layers = [stage.of(own) for stage, own in zip(stages, built, strict=True)]
    if chain.outline is None:
        # Moved together, what several layers share stays shared.
        together = nn.ModuleList(layer.module for of_stage in layers for layer in of_stage).to(device)
        _move(outlying_tensors(together, together.parameters()), device)
    return layers


def _build_parts(loaded: LoadedModel, wanted: Callable[[nn.Module], list[Tensor]], seed: int) -> nn.Module:
    """Return the model with the tensors that are wanted and, if its construction can be followed, no others."""
    if not loaded.is_without_values:
        with contextlib.suppress(BuildError):
            return build_only(loaded.build, wanted, seed=seed)
    torch.manual_seed(seed)
    model = loaded.build()
    if loaded.is_without_values:
        fill([model], model, torch.device("cpu"), initial=False)
    return model


def like(chain: Chain, loaded: LoadedModel, model: nn.Module) -> Chain:
    """The chain of another instance of the model that `chain` is of."""
    return loaded.chain(model) if chain.outline is None else outlined(chain.outline, model)


def held_names(chain: Chain, first: int, end: int) -> frozenset[str]:
    """Names of the parameters and buffers that layers `first`..`end - 1` need."""
    if chain.outline is not None:
        return frozenset[str]().union(*chain.outline.holds[first:end])
    prefixes = tuple(f"{layer.name}." for layer in chain.layers[first:end])
    return frozenset(name for name, _ in named_tensors(chain.model) if name.startswith(prefixes))


def keep_only(model: nn.Module, kept: Callable[[Tensor], Tensor | None], device: torch.device) -> None:
    """Puts `kept(tensor)` in place of every parameter and buffer, and an absent ghost where that is None."""
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}

    def other(tensor: Tensor) -> Tensor:
        instead = kept(tensor)
        return absent(tensor, device, names[id(tensor)]) if instead is None else instead

    replace_tensors(model, other)


def _held_by(chain: Chain, model: nn.Module, stages: Sequence[StageRange]) -> list[Tensor]:
    """What the layers of `stages` need."""
    names = frozenset[str]().union(*(held_names(chain, stage.first, stage.end) for stage in stages))
    return [tensor for name, tensor in named_tensors(model) if name in names]


def _emptied(tensor: Tensor) -> Tensor:
    empty = emptied(tensor)
    copy_attributes(tensor, empty)
    return empty


def _with_its_parameters(tensor: Tensor, held: Collection[int], device: torch.device) -> Tensor:
    """Return `tensor` on `device`, or an absent ghost if it was computed from a parameter that is not in `held`."""
    nodes, seen = [tensor.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in held:
            return absent(tensor, device, "a tensor computed from parameters of another stage")
        nodes.extend(above for above, _ in node.next_functions)
    return tensor.to(device)


def _instances(model: nn.Module, chain: Chain, count: int) -> list[nn.Module]:
    """One model for each stage, with tensors in common but for those that forward changes.

    Code between modules runs in every stage: in a model that stages share, it would count each micro-batch twice.
    """
    if chain.outline is None:
        return [model] * count
    changed = {state.name for state in chain.outline.recording.states}
    own = {id(tensor) for name, tensor in named_tensors(model) if name in changed and not tensor.requires_grad}
    tensors = [tensor for tensor in _with_outlying([model]) if id(tensor) not in own or isinstance(tensor, Ghost)]
    return [model, *(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}) for _ in range(count - 1))]


def _with_outlying(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of some modules, and the tensors outside of them that their code and hooks can read."""
    held = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [*held, *outlying_tensors(modules, held)]


def _move(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Moves tensors in place, since closures hold them."""
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
        return tensor
    return tensor.to(device)


def _all_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    return [*module.parameters(), *module.buffers(), *loose_tensors(module)]
