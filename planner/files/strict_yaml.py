"""YAML as JSON would have it: strict scalars, no duplicate keys, and the line of every key.

PyYAML's own reader takes `1e9` for a string, `no` for false, `12:30:00` for 45000, and the last of two equal keys.
"""

import json
import math
import re
from typing import Any

import yaml

from planner.core.errors import FileError
from planner.files.bounds import UnboundedError, check_bounds
from planner.files.quick_yaml import NotQuickError, json_content, quick_content

Key = str | int
KeyPath = tuple[Key, ...]
Problem = tuple[KeyPath, str, str]
"""Where, what is wrong, and what to do."""


_PLAINLY = "the files of gpipe-plan are plain lists and mappings; write the file anew with the command that makes it"

_TAGS = frozenset(("null", "bool", "int", "float", "str", "map", "seq"))

_ESCAPED_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class StrictLoader(yaml.CSafeLoader):
    """Scalars as JSON has them; everything else is a string (so `1e9` is a number and `no` is not a boolean)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as in PyYAML


for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?", list("-0123456789")),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class Document:
    """Plain content of a file and the line of every key in it."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.content: Any = None
        self._text = text
        self._lines: dict[KeyPath, int] = {}

    @classmethod
    def parse(cls, path: str, text: str) -> "Document":
        if not text.strip():
            raise FileError("is empty", path=path)
        document = cls(path, text)
        try:
            is_json = text.lstrip()[:1] == "{"
            document.content = json_content(text) if is_json else quick_content(text, document._built)
            document._lines = {}  # those of a text with marks in place of lines
        except (NotQuickError, FileError):
            document.content = document._read()
        return document

    @property
    def lines(self) -> dict[KeyPath, int]:
        """Line of every key; found out when it is asked for. None where JSON is laid out as no YAML is."""
        if not self._lines:
            try:
                self._read()
            except FileError:
                self._lines = {}
        return self._lines

    def _read(self) -> Any:
        text, path = self._text, self.path
        if path.endswith(".json") or text.lstrip()[:1] == "{":
            # YAML contains nearly all of JSON, and its reader knows the lines; what it does not have are the escapes of
            # characters beyond 16 bits, and one control character as it is.
            text = _ESCAPED_PAIR.sub(lambda pair: json.loads(f'"{pair[0]}"'), text).replace("\x7f", "\\x7f")
        return self._built(text)

    def _built(self, text: str) -> Any:
        """What YAML makes of a text, and the lines of its keys."""
        self._lines = {}
        node = self._composed(text)
        return None if node is None else self._plain(node, ())

    def _composed(self, text: str) -> yaml.Node | None:
        try:
            check_bounds(yaml.parse(text, Loader=StrictLoader))
            return yaml.compose(text, Loader=StrictLoader)
        except UnboundedError as error:
            raise FileError(error.message, path=self.path, line=error.line, hint=_PLAINLY) from None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise FileError(f"is not YAML: {error.problem}", path=self.path, line=line) from None
        except yaml.YAMLError as error:
            raise FileError(f"is not YAML: {error}", path=self.path) from None

    def _plain(self, node: yaml.Node, at: KeyPath) -> Any:
        self._lines[at] = node.start_mark.line + 1
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            problem = f"`{dotted(at)}`: the tag {node.tag[:60]} means nothing here"
            raise FileError(problem, path=self.path, line=self._lines[at], hint="leave it out")
        if isinstance(node, yaml.MappingNode):
            return self._plain_mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*at, n)) for n, item in enumerate(node.value)]
        try:
            return _plain_scalar(node)
        except ValueError:  # an explicit tag, such as `!!int foo`
            problem = f"`{dotted(at)}`: {node.value[:60]} is not of the type {node.tag}"
            raise FileError(problem, path=self.path, line=self._lines[at]) from None

    def _plain_mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in content:
                first = self._lines[*at, key]
                raise FileError(
                    f"`{dotted((*at, key))}` stands twice, first in line {first}", path=self.path, line=line
                )
            content[key] = self._plain(value_node, (*at, key))
            self._lines[*at, key] = line
        return content

    def line_of(self, at: KeyPath) -> int | None:
        """Line of the key, or of the nearest key above it."""
        while at and at not in self.lines:
            at = at[:-1]
        return self.lines.get(at)

    def refuse(self, problems: list[Problem]) -> FileError:
        """One error for all problems; the first is told in full."""
        at, text, hint = problems[0]
        further = [f"line {self.line_of(p)}: `{dotted(p)}`: {t}" for p, t, _ in problems[1:6]]
        if len(problems) > 6:
            further.append(f"and {len(problems) - 6} more")
        message = f"`{dotted(at)}`: {text}" if at else text
        return FileError("\n  ".join([message, *further]), path=self.path, line=self.line_of(at), hint=hint)


def _plain_scalar(node: yaml.Node) -> Any:
    tag = node.tag.rpartition(":")[2]
    if tag == "null":
        return None
    if tag == "bool":
        return node.value == "true"
    if tag == "int":
        return int(node.value)
    if tag == "float":
        number = float(node.value)
        return number if math.isfinite(number) else str(node.value)
    return str(node.value)


def dotted(at: KeyPath) -> str:
    """`layers[1].forward_us[0]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)
    return text.lstrip(".")
