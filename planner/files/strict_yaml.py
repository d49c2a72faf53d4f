"""Parse strict YAML: scalars as in JSON, no tags, no aliases, no duplicate keys, and the line of every key.

PyYAML's own reader takes `1e9` for a string, `no` for false and `12:30:00` for 45000. It also accepts duplicate keys.
"""

import json
import math
import re
from typing import Any, Final

import yaml

from planner.core.errors import FileError

Key = str | int
KeyPath = tuple[Key, ...]
Problem = tuple[KeyPath, str, str]
"""Key path of a value, description of what is wrong with the value, and hint for the user."""


_WRITE_AGAIN = "files of gpipe-plan are plain lists and mappings; write the file again with the command that makes it"
_ESCAPED_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
"""Pattern of texts that are read as numbers, as in JSON."""

MAX_DEPTH = 32
"""Largest nesting depth of lists and mappings of a YAML file; our own files need eight."""

MAX_VALUES = 2**23
"""Largest number of values of a YAML file; a profile of ten thousand layers has about two million."""


class Document:
    """Plain content of a YAML or JSON file, and the line of every key."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.content: Any = None
        self._text = text
        self._lines: dict[KeyPath, int] = {}

    @classmethod
    def parse(cls, path: str, text: str) -> "Document":
        """Parse the text of the file `path`.

        Raises:
            FileError: The text is empty or invalid.
        """
        if not text.strip():
            raise FileError("is empty", path=path)
        document = cls(path, text)
        is_json = text.lstrip()[:1] == "{"
        document.content = _json_content(text) if is_json else None
        if document.content is None:
            document.content = document._read()
        return document

    @property
    def lines(self) -> dict[KeyPath, int]:
        """Line of every key; empty for a JSON file that the YAML reader cannot parse."""
        if not self._lines:
            try:
                self._read(notes_lines=True)
            except FileError:
                self._lines = {}
        return self._lines

    def _read(self, *, notes_lines: bool = False) -> Any:
        text, path = self._text, self.path
        if path.endswith(".json") or text.lstrip()[:1] == "{":
            # The YAML reader, which reports lines, accepts nearly all of JSON. The exceptions are escaped characters of
            # more than 16 bits and one unescaped control character.
            text = _ESCAPED_PAIR.sub(lambda pair: json.loads(f'"{pair[0]}"'), text).replace("\x7f", "\\x7f")
        try:
            reader = _DocumentReader(text, notes_lines=notes_lines)
            content = reader.document()
        except _RefusedError as error:
            raise FileError(error.message, path=path, line=error.line, hint=error.hint) from None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise FileError(f"is not YAML: {error.problem}", path=path, line=line) from None
        except yaml.YAMLError as error:
            raise FileError(f"is not YAML: {error}", path=path) from None
        self._lines = reader.lines
        return content

    def line_of(self, at: KeyPath) -> int | None:
        """Return the line of a key, or of its nearest parent key; None if unknown."""
        while at and at not in self.lines:
            at = at[:-1]
        return self.lines.get(at)

    def error_for(self, problems: list[Problem]) -> FileError:
        """Return one error that lists up to six problems and counts the rest."""
        at, text, hint = problems[0]
        further = [f"line {self.line_of(p)}: `{dotted(p)}`: {t}" for p, t, _ in problems[1:6]]
        if len(problems) > 6:
            further.append(f"and {len(problems) - 6} more")
        message = f"`{dotted(at)}`: {text}" if at else text
        return FileError("\n  ".join([message, *further]), path=self.path, line=self.line_of(at), hint=hint)


class _RefusedError(Exception):
    def __init__(self, message: str, event: yaml.Event, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.line, self.hint = message, _line_of(event), hint


class _DocumentReader:
    """Reader that builds a document from parser events, several times faster than PyYAML's own."""

    def __init__(self, text: str, *, notes_lines: bool) -> None:
        self._events = yaml.parse(text, Loader=yaml.CBaseLoader)
        self._path: list[Key] = []
        self._num_values = 0
        self._notes_lines = notes_lines
        self.lines: dict[KeyPath, int] = {}

    def document(self) -> Any:
        next(self._events)
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        content = self._value(next(self._events))
        next(self._events)
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise _RefusedError("is not YAML: it contains another document", event)
        return content

    def _value(self, event: Any) -> Any:
        if self._notes_lines:
            self.lines[tuple(self._path)] = _line_of(event)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _RefusedError(f"has more than {MAX_VALUES} values", event, _WRITE_AGAIN)
        if len(self._path) > MAX_DEPTH:
            raise _RefusedError(f"is nested more than {MAX_DEPTH} levels deep", event, _WRITE_AGAIN)
        if isinstance(event, yaml.AliasEvent):
            problem = f"`{self._dotted()}`: the alias `*{str(event.anchor)[:40]}` is not supported"
            raise _RefusedError(problem, event, "write the value itself")
        if event.tag:
            problem = f"`{self._dotted()}`: the tag {event.tag[:60]} is not supported"
            raise _RefusedError(problem, event, "remove it")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        return self._sequence() if isinstance(event, yaml.SequenceStartEvent) else self._mapping()

    def _sequence(self) -> list[Any]:
        items: list[Any] = []
        self._path.append(0)
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            self._path[-1] = len(items)
            items.append(self._value(event))
        self._path.pop()
        return items

    def _mapping(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        self._path.append("")
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._path[-1] = self._key(event)
            line = _line_of(event)
            if key in content:
                problem = f"`{self._dotted()}` is defined twice, first in line {first_lines[key]}"
                raise _RefusedError(problem, event)
            content[key] = self._value(next(self._events))
            first_lines[key] = line
            if self._notes_lines:
                self.lines[tuple(self._path)] = line
        self._path.pop()
        return content

    def _key(self, event: yaml.Event) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise _RefusedError("a key is not a text", event)
        return str(event.value)

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        try:
            return _plain_scalar(event.value) if event.implicit[0] else event.value
        except ValueError:  # Python refuses integers with thousands of digits
            raise _RefusedError(f"`{self._dotted()}`: {event.value[:60]}… has too many digits", event) from None

    def _dotted(self) -> str:
        return dotted(tuple(self._path))


def _line_of(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}


def _plain_scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "-0123456789":
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    return _float(text) if NUMBER.fullmatch(text) else text


def _json_content(text: str) -> Any:
    """Return the content of a JSON text; None for invalid JSON and for repeated keys."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_float=_float, parse_constant=str)
    except (ValueError, RecursionError):
        return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError  # the YAML reader reports the line
    return content


def dotted(at: KeyPath) -> str:
    """Return the text of a key path, such as `layers[1].forward_us[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)
    return text.lstrip(".")
