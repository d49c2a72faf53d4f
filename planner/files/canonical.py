"""Conversion of dataclasses to plain dicts, lists and scalars, and digests of them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

from planner.core.values.left_out import LEFT_OUT
from planner.core.values.profile import BoundaryTensor, MemoryDetail, ProgramMemory, SplitMemory
from planner.core.values.proof import Proof

_SPARE = frozenset({BoundaryTensor, MemoryDetail, ProgramMemory, Proof, SplitMemory})
"""Classes whose fields are left out if they have their default value, to keep profiles short."""


def to_plain(value: Any) -> Any:
    """Convert a dataclass, with all values in it, to plain dicts and lists.

    A field that has a default is left out if its value is None or empty. Another rule applies to fields marked
    `LEFT_OUT` and to all fields of a few classes: they are left out if they have their default value.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in _ATOMS else to_plain(item) for item in value]
    if kind is dict:
        return {key: to_plain(item) for key, item in value.items()}
    if is_dataclass(kind):
        values = ((name, getattr(value, name), left_out) for name, left_out in _fields_of(kind))
        return {name: to_plain(item) for name, item, left_out in values if left_out is None or not left_out(item)}
    return value


_ATOMS = frozenset({int, float, str, bool, type(None)})


@cache
def _fields_of(kind: type) -> tuple[tuple[str, Callable[[Any], bool] | None], ...]:
    # Cached, because a profile has a hundred thousand fields. The functions return True for values to leave out.
    return tuple((field.name, _left_out(field, kind)) for field in fields(kind))


def _left_out(field: "Field[Any]", kind: type) -> Callable[[Any], bool] | None:
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    if kind in _SPARE or field.metadata == LEFT_OUT:
        default = field.default
        return lambda value: bool(value == default)
    return lambda value: value is None or value in ("", (), {})


def digest_of(value: Any) -> str:
    """Return a digest `sha256:…` of the values in a dataclass, without its field `generator`."""
    plain = to_plain(value)
    if isinstance(plain, dict):
        plain.pop("generator", None)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
