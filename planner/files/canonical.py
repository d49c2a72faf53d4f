"""The plain content of a value, and its digest."""

import hashlib
import json
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

__all__ = ["digest_of", "to_plain"]


def to_plain(value: Any) -> Any:
    """Dataclasses to plain dicts and lists, optional fields that hold nothing left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if _says_something(f, value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def _says_something(field: "Field[Any]", owner: Any) -> bool:
    value = getattr(owner, field.name)
    has_default = field.default is not MISSING or field.default_factory is not MISSING
    if not has_default:
        return True
    if getattr(owner, "__compact__", False) or field.name in getattr(owner, "__quiet__", ()):
        return bool(value != field.default)
    return value is not None and value not in ("", (), {})


def digest_of(value: Any, *, leave_out: tuple[str, ...] = ("generator",)) -> str:
    """`sha256:…` over the canonical JSON of `value`: unchanged by formatting, changed by any number in it."""
    plain = to_plain(value)
    if isinstance(plain, dict):
        plain = {key: item for key, item in plain.items() if key not in leave_out}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
