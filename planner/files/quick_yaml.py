"""YAML of which whole lines are read as JSON: what our own writer makes of a profile, seven times faster.

A large profile is megabytes, nearly all of it in lines like `- {name: h.0, forward_us: [1.5, 2.5]}`: JSON but for the
quotes around words, which would make every line longer and no fun to edit. YAML needs nine seconds for ten thousand
such lines with their memory records (13 MB). So they are read as JSON, and YAML reads the rest, with a mark in their
place:

    layers:                                  layers:
    - {name: h.0, forward_us: [1.5]}   ->    - "<line 0>"
    - {name: h.1, forward_us: [2.5]}         unit: us
    unit: us

How a document is laid out is therefore YAML's to say alone, and so is whatever looks different in a line. A document
that is JSON throughout is read as that at once.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from planner.files.bounds import is_too_deep

_LINE = re.compile(r"(- |[a-z_]+: )([\[{].*)")
_WORD = re.compile(r"'[^'\"\\]*'|(?<![\w.+\-])[A-Za-z_][\w.\-/]*")
_STRANGE = re.compile(r"[\"\\#&*!|>%@`~?\t\r]|[:,]['\w.\-\[{]|'[^'\"\\]*'[^,\]}:]")
"""What means something else in YAML than in JSON, or may: a colon or comma without a space behind it among them."""

_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""What also ends a line in YAML."""

_SAME = frozenset({"true", "false", "null"})

_MARK = "<line "


class NotQuickError(Exception):
    """The text cannot be read so."""


def json_content(text: str) -> Any:
    """The content of a JSON document, with the same meaning that the YAML reader gives it.

    Raises:
        NotQuickError: It is none, or has something wrong: the real reader will tell.
    """
    if is_too_deep(text):
        raise NotQuickError
    try:
        return json.loads(text, object_pairs_hook=_once, parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):
        raise NotQuickError from None


def quick_content(text: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """The content of a mapping, lines of which are JSON but for quotes; `read` reads the YAML around them.

    Raises:
        NotQuickError: A mark would not stand for its line: YAML must read the whole text.
        FileError: YAML refuses the rest, in the words that `read` has for it.
    """
    if _OTHER_BREAKS.search(text) or _MARK in text:
        raise NotQuickError
    rest, values = _marked(text)
    content = read(rest)
    # A line can also lie in a quoted text of several lines, and be had twice through an anchor.
    if not isinstance(content, dict) or repr(content).count(_MARK) != len(values):
        raise NotQuickError
    for key, item in content.items():
        if isinstance(item, list):
            content[key] = [one for entry in item for one in _meant(entry, values, [entry])]
        else:
            content[key] = _meant(item, values, item)
    if values:
        raise NotQuickError
    return content


def _marked(text: str) -> tuple[str, dict[str, Any]]:
    """The text with a mark for each value that is a quick line, or for all items that follow each other; and these."""
    rest: list[str] = []
    values: dict[str, Any] = {}
    items: list[Any] | None = None
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        value = _value(match[2]) if match else None
        if match is None or value is None:
            rest.append(line)
            items = None
        elif items is not None and match[1] == "- ":
            items.append(value)
        else:
            items = [value] if match[1] == "- " else None
            mark = f"{_MARK}{len(values)}>"
            rest.append(f'{match[1]}"{mark}"')
            values[mark] = value if items is None else items
    return "\n".join(rest), values


def _value(text: str) -> Any:
    """The list or mapping that a text is, in JSON but for quotes; None where YAML might take it for something else."""
    if _STRANGE.search(text):
        return None
    try:
        return json_content(_WORD.sub(_quoted, text))
    except NotQuickError:
        return None


def _quoted(match: re.Match[str]) -> str:
    word = match[0]
    if word in _SAME:
        return word
    return f'"{word[1:-1]}"' if word[0] == "'" else f'"{word}"'


def _meant(entry: Any, values: dict[str, Any], otherwise: Any) -> Any:
    return values.pop(entry, otherwise) if isinstance(entry, str) else otherwise


def _number(text: str) -> float | str:
    """A finite number, else the text: what is too large for a number is none."""
    number = float(text)
    return number if math.isfinite(number) else text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise NotQuickError  # the real reader says in which line
    return content
