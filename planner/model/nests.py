"""Flatten and rebuild nested values: tuples, lists, dicts and dataclasses that models take and return.

Torch's pytrees know only registered types. They also flatten key-value caches, which must stay one object.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

ABSENT: Final = object()
"""Placeholder for a missing leaf."""


@dataclass(frozen=True, eq=False)
class Nest:
    """Structure of a nested value: its type, keys, and the structures of its items."""

    kind: type | None = None
    """Type of the value; None for a leaf."""
    keys: tuple[Any, ...] = ()
    children: tuple["Nest", ...] = ()

    def __eq__(self, other: object) -> bool:
        """Return True if the structures are equal."""
        return isinstance(other, Nest) and self.has_same_items(other) and self.children == other.children

    def __hash__(self) -> int:
        """Return the same hash for equal structures."""
        return hash((_name(self.kind), self.keys, self.children))

    def has_same_items(self, other: "Nest") -> bool:
        """Return True if types and keys are equal, whatever the structures of the items.

        Types with the same name count as equal, because each forward may define a new class, such as a named tuple.
        """
        return self.keys == other.keys and (self.kind is other.kind or _name(self.kind) == _name(other.kind))


def _name(kind: type | None) -> str:
    return "" if kind is None else f"{kind.__module__}.{kind.__qualname__}"


_LEAF = Nest()


def flatten(value: Any) -> tuple[list[Any], Nest]:
    """Return the leaves of the nested `value` in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _nest(value, leaves)


def unflatten(leaves: Iterable[Any], nest: Nest) -> Any:
    """Return the nested value with structure `nest` and these leaves."""
    return _value(iter(leaves), nest)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the nested `value`, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def tensors_within(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in the nested `value` and in attributes of objects in it, such as a distribution."""
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, type | nn.Module):
            yield from tensors_within(list(getattr(leaf, "__dict__", {}).values()), depth - 1)


def leaf_names(nest: Nest, prefix: str = "") -> list[str]:
    """Return a name for every leaf of `nest`: its keys and positions, joined by dots."""
    if nest.kind is None:
        return [prefix]
    below = zip(nest.keys, nest.children, strict=True)
    return [name for key, child in below for name in leaf_names(child, f"{prefix}.{key}" if prefix else str(key))]


def align_leaves(value: Any, nest: Nest) -> list[Any]:
    """Return a leaf of `value` for each leaf of `nest`; ABSENT where the structures differ."""
    leaves, structure = flatten(value)
    return _aligned(iter(leaves), structure, nest)


def _aligned(leaves: Iterator[Any], nest: Nest, wanted: Nest) -> list[Any]:
    if not nest.has_same_items(wanted):
        for _ in leaf_names(nest):
            next(leaves)
        return [ABSENT] * len(leaf_names(wanted))
    if nest.kind is None:
        return [next(leaves)]
    return [leaf for a, b in zip(nest.children, wanted.children, strict=True) for leaf in _aligned(leaves, a, b)]


def common_nest(nest: Nest, other: Nest) -> Nest:
    """Return the structure that two values share. Items that differ in structure become leaves."""
    if not nest.has_same_items(other):
        return _LEAF
    return Nest(nest.kind, nest.keys, tuple(map(common_nest, nest.children, other.children)))


def common_leaf_positions(nest: Nest, common: Nest) -> list[int | None]:
    """Return for each leaf of `common` its position among the leaves of `nest`.

    `common` is a result of `common_nest`. The position is None if `nest` has a nested value in place of the leaf.
    """
    positions = _aligned(iter(range(len(leaf_names(nest)))), nest, common)
    return [None if position is ABSENT else position for position in positions]


def _nest(value: Any, leaves: list[Any]) -> Nest:
    keys: Iterable[Any]
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        kind, keys, children = type(value), range(len(value)), list(value)
    elif _is_plain_dataclass(value):
        keys = [field.name for field in dataclasses.fields(value)]
        kind, children = type(value), [getattr(value, key) for key in keys]
    elif type(value) in (dict, OrderedDict):
        kind, keys, children = type(value), list(value), list(value.values())
    else:
        leaves.append(value)
        return _LEAF
    return Nest(kind, tuple(keys), tuple(_nest(child, leaves) for child in children))


def _is_plain_dataclass(value: Any) -> bool:
    # A dataclass that cannot be rebuilt from its fields is treated as a leaf.
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
    )


def _value(leaves: Iterator[Any], nest: Nest) -> Any:
    if nest.kind is None:
        return next(leaves)
    make: Callable[..., Any] = nest.kind
    children = [_value(leaves, child) for child in nest.children]
    if dataclasses.is_dataclass(nest.kind):
        return make(**dict(zip(nest.keys, children, strict=True)))
    if issubclass(nest.kind, dict):
        return make(zip(nest.keys, children, strict=True))
    if hasattr(nest.kind, "_fields"):  # a named tuple
        return make(*children)
    return make(children)
