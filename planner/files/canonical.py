"""The plain content of a value, and its digest."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

__all__ = ["digest_of", "to_plain"]


def to_plain(value: Any) -> Any:
    """Dataclasses to plain dicts and lists, optional fields that hold nothing left out."""
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
    """Names of the fields, and when one is left out: None for never. A profile has a hundred thousand of them."""
    return tuple((field.name, _left_out(field, kind)) for field in fields(kind))


def _left_out(field: "Field[Any]", kind: type) -> Callable[[Any], bool] | None:
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    if getattr(kind, "__compact__", False) or field.name in getattr(kind, "__quiet__", ()):
        default = field.default
        return lambda value: bool(value == default)
    return lambda value: value is None or value in ("", (), {})


def digest_of(value: Any, *, leave_out: tuple[str, ...] = ("generator",)) -> str:
    """`sha256:…` over the canonical JSON of `value`: unchanged by formatting, changed by any number in it."""
    plain = to_plain(value)
    if isinstance(plain, dict):
        plain = {key: item for key, item in plain.items() if key not in leave_out}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
