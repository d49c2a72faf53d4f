"""Copy modules whose attributes may hold objects that Python cannot copy, such as open files and locks."""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

_Module = TypeVar("_Module")

_UNCOPYABLE = (TypeError, RuntimeError)
"""Errors of `copy.deepcopy` for objects without a copy, such as locks, and for tensors with a graph."""


def copy_module(module: _Module, instead: Mapping[int, Any] = MappingProxyType({})) -> _Module:
    """Return a deep copy of a module or list of modules. Objects that cannot be copied are shared with the original.

    `instead` maps the `id()` of an object to the object that replaces it in the copy.
    """
    try:
        return copy.deepcopy(module, dict(instead))
    except _UNCOPYABLE:
        shared = {id(value): value for value in _uncopyable(module, instead, set())}
        return copy.deepcopy(module, {**shared, **instead})


def _uncopyable(value: Any, instead: Mapping[int, Any], visited: set[int]) -> Iterator[Any]:
    """Yield the smallest parts of `value` that cannot be copied."""
    if id(value) in visited or id(value) in instead:
        return
    visited.add(id(value))
    try:
        copy.deepcopy(value, dict(instead))
    except _UNCOPYABLE:
        found = [each for part in _parts(value) for each in _uncopyable(part, instead, visited)]
        yield from found or [value]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
