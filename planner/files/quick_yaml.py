"""The layout that our own writer gives a profile, read many times faster than YAML is.

A large profile is hundreds of kilobytes, nearly all of it in lines like `- {name: h.0, forward_us: [1.5, 2.5]}`: JSON
but for the quotes. Such lines become JSON by quoting their words; whatever looks different is left to the real reader.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from planner.files.bounds import is_too_deep

__all__ = ["NotQuickError", "number", "once", "quick_content"]

_LINE = re.compile(r"(?:(?P<key>[a-z_]+):|-)(?: (?P<rest>\S.*))?")
_WORD = re.compile(r"'[^'\"\\]*'|(?<![\w.+\-])[A-Za-z_][\w.\-/]*")
_STRANGE = re.compile(r"[\"\\#&*!|>%@`~?\t\r]|[:,]['\w.\-\[{]|'[^'\"\\]*'[^,\]}:]")
"""What means something else in YAML than in JSON, or may: a colon or comma without a space behind it among them."""

_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""What also ends a line in YAML."""

_SAME = frozenset({"true", "false", "null"})


class NotQuickError(Exception):
    """The text has another layout."""


def quick_content(text: str, slow: Callable[[str], Any]) -> dict[str, Any]:
    """The content of a mapping with one key, or one item of a list, to a line.

    Args:
        text: The document.
        slow: Reads the few values that are no quick JSON, in brackets or on their own.

    Raises:
        NotQuickError: The text is laid out otherwise, or is wrong in some way: the real reader will tell.
    """
    if _OTHER_BREAKS.search(text):
        raise NotQuickError
    content: dict[str, Any] = {}
    items: list[Any] | None = None
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise NotQuickError
        key, rest = match["key"], match["rest"]
        if key is None:
            if items is None or rest is None:
                raise NotQuickError
            items.append(_value(rest, slow))
        elif key in content:
            raise NotQuickError
        elif rest is None:
            content[key] = items = []
        else:
            content[key], items = _value(rest, slow), None
    if not content or any(value == [] for value in content.values()):
        raise NotQuickError
    return content


def _value(text: str, slow: Callable[[str], Any]) -> Any:
    if text[0] not in "[{":
        scalar = slow(text)
        if isinstance(scalar, (dict, list)):
            raise NotQuickError
        return scalar
    if _STRANGE.search(text):
        return slow(text)
    quoted = _WORD.sub(_quoted, text)
    if is_too_deep(quoted):
        return slow(text)
    try:
        return json.loads(quoted, object_pairs_hook=once, parse_float=number)
    except (ValueError, RecursionError):
        return slow(text)


def _quoted(match: re.Match[str]) -> str:
    word = match[0]
    if word in _SAME:
        return word
    return f'"{word[1:-1]}"' if word[0] == "'" else f'"{word}"'


def number(text: str) -> float | str:
    """A finite number, else the text: what is too large for a number is none."""
    number = float(text)
    return number if math.isfinite(number) else text


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of pairs with different keys.

    Raises:
        NotQuickError: A key stands twice.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        raise NotQuickError  # the real reader says in which line
    return content
