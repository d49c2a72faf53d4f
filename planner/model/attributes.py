"""Record values that a module's forward stores in attributes for later code, such as `self.aux_loss` of an expert.

Attributes are compared before and after a call, including the lists, dicts and user-defined objects in attributes. A
change is recorded if the new value is a tensor, a plain value such as a number, or a nest of these.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.model.leaves import TensorLeaf, is_plain
from planner.model.nests import ABSENT, Nest, flatten, unflatten

# Libraries set `forward` of an instance; `torch.compile` and `module.compile()` set the other two names.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl", "_torchdynamo_wrapper_id"}
"""Names of the attributes that every `nn.Module` may have. They hold no state of a model."""


_DEEPEST = 3
"""Number of nested levels of an attribute that are compared."""


@dataclass(frozen=True, kw_only=True)
class AttributeChange:
    """Attribute, or entry of a dict or list, that a forward changed."""

    path: str
    """Path of the module."""
    keys: tuple[Any, ...]
    """Name of the attribute, then keys in nested containers."""
    kind: Literal["set", "extended", "replaced"]
    """`set`: an attribute or dict entry was set. `extended`: a list got more items. `replaced`: it got other items."""
    nest: Nest
    leaves: tuple[Any, ...]
    """Leaves of the new value, or of the new items of an extended list; in a `Recording`, a `Leaf` for each value."""

    @property
    def contains_tensor(self) -> bool:
        """True if the recorded value contains a tensor."""
        return any(isinstance(leaf, TensorLeaf) for leaf in self.leaves)


@dataclass(frozen=True)
class _Container:
    path: str
    keys: tuple[Any, ...]
    live: Any
    before: Any


class AttributeSnapshot:
    """Snapshot of the attributes of some modules, to find and undo later changes.

    Args:
        modules: Pairs of a module's path and the module.
        of_model: Snapshot of the whole model, which gives the paths of objects that several modules share; or None.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], of_model: "AttributeSnapshot | None" = None) -> None:
        self._containers: dict[int, _Container] = {}
        self._named = {} if of_model is None else of_model._containers
        for path, module in modules:
            self._add_container(path, (), vars(module))

    def changes(self) -> list[AttributeChange]:
        """Return the attributes that changed since the snapshot, up to three levels of nested objects."""
        return [change for container in self._containers.values() for change in _changes(container)]

    def current_tensors(self) -> list[Tensor]:
        """Return the tensors that are now in the attributes, up to three levels of nested objects."""
        leaves: list[Any] = []
        for container in self._containers.values():
            live = dict(enumerate(container.live)) if isinstance(container.live, list) else container.live
            leaves += tree_leaves([v for key, v in live.items() if container.keys or key not in OF_EVERY_MODULE])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def restore(self) -> None:
        """Restore tensors, and plain values such as counters and flags. Other attribute changes may remain."""
        for container in self._containers.values():
            live, before = container.live, container.before
            if isinstance(live, dict):
                live.update({k: value for k, value in before.items() if is_plain(value) and is_plain(live.get(k))})
            if not any(isinstance(leaf, Tensor) for change in _changes(container) for leaf in change.leaves):
                continue
            if isinstance(live, list):
                live[:] = before
                continue
            for key in [key for key in live if key not in before and key not in OF_EVERY_MODULE]:
                del live[key]
            live.update(before)

    def _add_container(self, path: str, keys: tuple[Any, ...], container: Any) -> None:
        if id(container) in self._containers:
            return
        named = self._named.get(id(container))
        path, keys = (path, keys) if named is None else (named.path, named.keys)
        items = (
            list(container)
            if isinstance(container, list)
            else {key: value for key, value in container.items() if keys or key not in OF_EVERY_MODULE}
        )
        # The container is added before its content is followed, because objects may refer to each other in cycles.
        self._containers[id(container)] = _Container(path, keys, container, items)
        if len(keys) >= _DEEPEST:
            return
        for key, value in enumerate(items) if isinstance(items, list) else items.items():
            inside = _items_or_attributes(value)
            if inside is not None:
                self._add_container(path, (*keys, key), inside)


def apply_change(model: nn.Module, change: AttributeChange, leaves: Sequence[Any]) -> None:
    """Make a recorded attribute change on `model`, with new values.

    Args:
        model: The model.
        change: Recorded change.
        leaves: New values, in the order of `change.leaves`.

    Raises:
        LookupError: `model` has no dict, list or object at the path of the change.
    """
    value = unflatten(leaves, change.nest)
    container = _container(model, change)
    if change.kind == "extended":
        container.extend(value)
    elif change.kind == "replaced":
        container[:] = value
    else:
        container[change.keys[-1]] = value


def stored_leaves(model: nn.Module, change: AttributeChange) -> list[Any]:
    """Return the leaves of the value that is now in the attribute of `change`.

    For a list to which a forward appends items, only the newest items count.

    Raises:
        LookupError: The attribute has no value, or its structure differs from the recording.
    """
    container = _container(model, change)
    # A list that is not emptied between steps is longer than in the recording; its last items are the new ones.
    if change.kind == "set":
        value = container[change.keys[-1]]
    else:
        number = len(change.nest.children) if change.kind == "extended" else len(container)
        value = tuple(container[len(container) - number :])
    leaves, nest = flatten(value)
    if nest != change.nest:
        raise LookupError
    return leaves


@contextmanager
def undo_attribute_changes(model: nn.Module, changes: Iterable[AttributeChange]) -> Iterator[None]:
    """Undo recorded attribute changes when the `with` block ends."""
    before: list[tuple[Any, Any, Any]] = []
    for change in changes:
        try:
            container = _container(model, change)
        except LookupError:  # forward creates the container, within another container that is restored
            continue
        if change.kind == "set":
            before.append((container, change.keys[-1], container.get(change.keys[-1], ABSENT)))
        else:
            before.append((container, slice(None), list(container)))
    try:
        yield
    finally:
        for container, key, value in reversed(before):
            if value is ABSENT:
                container.pop(key, None)
            else:
                container[key] = value


def _changes(container: _Container) -> Iterator[AttributeChange]:
    path, keys, live, before = container.path, container.keys, container.live, container.before
    if isinstance(live, list):
        if not _are_same(live, before):
            is_longer = _are_same(live[: len(before)], before)
            items = live[len(before) :] if is_longer else live
            yield from _followed(path, keys, "extended" if is_longer else "replaced", tuple(items))
        return
    for key, value in live.items():
        if not keys and key in OF_EVERY_MODULE:
            continue
        if key not in before or not _is_same(value, before[key]):
            yield from _followed(path, (*keys, key), "set", value)


def _followed(
    path: str, keys: tuple[Any, ...], kind: Literal["set", "extended", "replaced"], value: Any
) -> Iterator[AttributeChange]:
    leaves, nest = flatten(value)
    if all(isinstance(leaf, Tensor) or is_plain(leaf) for leaf in leaves):
        yield AttributeChange(path=path, keys=keys, kind=kind, nest=nest, leaves=tuple(leaves))


def _are_same(items: Sequence[Any], other_items: Sequence[Any]) -> bool:
    return len(items) == len(other_items) and all(map(_is_same, items, other_items))


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (is_plain(value) and type(value) is type(other) and bool(value == other))


def value_at(model: nn.Module, path: str, keys: Sequence[Any]) -> Any:
    """Return a value in an attribute of the module at `path`; None if there is none.

    Args:
        model: The model.
        path: Path of the module.
        keys: Name of the attribute, then keys and indices in nested containers and objects.
    """
    at: Any = vars(_module_at(model, path))
    for key in keys[:-1]:
        at = _items_or_attributes(at[key])
    return at.get(keys[-1]) if isinstance(at, dict) else at


def _module_at(model: nn.Module, path: str) -> Any:
    # `get_submodule` is slower, and this runs for each change in each forward of a stage.
    module: Any = model
    for name in path.split(".") if path else ():
        module = module._modules[name]
    return module


def _container(model: nn.Module, change: AttributeChange) -> Any:
    at: Any = vars(_module_at(model, change.path))
    for key in change.keys[:-1] if change.kind == "set" else change.keys:
        at = _items_or_attributes(at[key])
        if at is None:
            raise LookupError
    return at


def _items_or_attributes(value: Any) -> Any:
    if type(value) in (list, dict, OrderedDict, defaultdict):
        return value
    if isinstance(value, Tensor | nn.Module | type) or callable(value) or is_plain(value):
        return None
    attributes = getattr(value, "__dict__", None)
    is_user_module = not type(value).__module__.startswith((torch.__name__, "builtins", "collections"))
    return attributes if type(attributes) is dict and is_user_module else None
