"""Skip most of a model's repeated layers, so that the equivalence check needs little memory and time.

Of consecutive equal layers, two are kept, so that every kind of layer still has every kind of neighbor:

    embedding  block 0  block 1  block 2  ...  block 46  block 47  head
    embedding  block 0  -------- passed through --------  block 47  head

The module of a skipped layer stays in the model, but has no parameters and returns its input.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from planner.model.chain import Chain
from planner.model.lean import build_lean
from planner.model.leaves import ArgumentLeaf, ConstantValue, Leaf, TensorLeaf
from planner.model.load import LoadedModel
from planner.model.nests import Nest, flatten, unflatten

_LONGEST_PERIOD = 8
"""Largest number of layers in a group that repeats, such as a layer with local and one with global attention."""


@dataclass(frozen=True, kw_only=True)
class SkippedModule:
    """Module that returns its input instead of running."""

    path: str
    leaves: tuple[Leaf, ...] = ()
    nest: Nest | None = None
    """Structure of the module's recorded result; None in a Sequential, where the module returns its only argument."""


def repeated_layers(keys: Sequence[Hashable]) -> list[int]:
    """Return the indices of layers that can be skipped. Equal layers have equal `keys`.

    If a group of layers repeats, all its copies except two can be skipped.
    """
    dropped: list[int] = []
    first = 0
    while first < len(keys):
        best = (0, 1)
        for period in range(1, _LONGEST_PERIOD + 1):
            end = first + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            num_dropped = ((end - first) // period - 2) * period
            best = max(best, (num_dropped, -period))
        num_dropped, period = best[0], abs(best[1])
        if num_dropped > 0:
            dropped.extend(range(first + period, first + period + num_dropped))
            first += period + num_dropped
        else:
            first += 1
    return dropped


def skipped_modules(chain: Chain, layers: Sequence[int]) -> tuple[SkippedModule, ...] | None:
    """Return the modules of `layers` as `SkippedModule`; None if a module cannot be skipped."""
    if chain.outline is None:
        return tuple(SkippedModule(path=chain.names[layer]) for layer in layers)
    skipped = []
    for layer in layers:
        modules = chain.outline.modules[layer]
        calls = [call for call in chain.outline.recording.calls if call.path in modules]
        if len(modules) != 1 or len(calls) != 1:
            return None
        kinds = [type(leaf) for leaf in calls[0].leaves]
        if kinds.count(TensorLeaf) != 1 or not set(kinds) <= {TensorLeaf, ConstantValue, ArgumentLeaf}:
            return None
        skipped.append(SkippedModule(path=modules[0], leaves=calls[0].leaves, nest=calls[0].nest))
    return tuple(skipped)


def shorten_model(loaded: LoadedModel, skipped: Sequence[SkippedModule], *, lean: bool = False) -> LoadedModel:
    """Return `loaded` with a `build` function that skips some modules.

    Args:
        loaded: The model.
        skipped: Modules that are skipped.
        lean: True to build parameters on the meta device (`planner.model.lean`).
    """

    def build() -> nn.Module:
        model = build_lean(loaded.build) if lean else loaded.build()
        for each in skipped:
            module = model.get_submodule(each.path)
            tables: tuple[dict[str, Any], ...] = (module._modules, module._parameters, module._buffers)
            for held in tables:
                held.update(dict.fromkeys(held))  # The names stay, because code may ask whether there is a bias.
            vars(module)["forward"] = _passing(each)
        return model

    return replace(loaded, build=build, is_without_values=lean)


def _passing(skipped: SkippedModule) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if skipped.nest is None:
            return args[0]
        arguments = flatten((args, kwargs))[0]
        first = next(leaf for leaf in arguments if isinstance(leaf, Tensor))
        return unflatten([_leaf(leaf, arguments, first) for leaf in skipped.leaves], skipped.nest)

    return forward


def _leaf(leaf: Leaf, arguments: Sequence[Any], value: Tensor) -> Any:
    match leaf:
        case ArgumentLeaf():
            return arguments[leaf.argument]
        case ConstantValue():
            return leaf.value
        case _:
            return value
