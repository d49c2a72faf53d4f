"""Plain content to values, by the types of their fields: all that pydantic does for us, and what its errors mean.

The values are dataclasses of the standard library, which say nothing of files. Here alone stands that no key may be in
a file that their fields do not name, and which texts a field takes whose type is no closed set: `_CHOICES`.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NewType, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, SchemaValidator
from pydantic_core.core_schema import DataclassSchema, literal_schema

from planner.core.schedule import GIVEN, SCHEDULE_CHOICES, SCHEDULES, SEARCHED
from planner.core.values.balance import Balance
from planner.core.values.plan import FrontierPoint, Inputs, Plan
from planner.files.strict_yaml import Document, KeyPath, Problem

_T = TypeVar("_T")

_CHOICES: dict[tuple[type, str], Sequence[str]] = {
    (Balance, "schedule"): (*SCHEDULES, SEARCHED.name),
    (FrontierPoint, "schedule"): (*SCHEDULES, SEARCHED.name),
    (Inputs, "schedule"): (*SCHEDULE_CHOICES, GIVEN),
    (Plan, "schedule"): (*SCHEDULES, SEARCHED.name),
}
"""By class and field; `planner.core.values` lies below the schedules, and cannot name them."""


def validated(kind: type[_T], plain: str, document: Document) -> _T:
    """The value of class `kind` that a file holds, whose content as JSON is `plain`; the document knows its lines.

    Raises:
        FileError: A key is unknown or missing, or its value is of another type; names all of them.
    """
    try:
        return cast("_T", SchemaValidator(_core_schema(kind)).validate_json(plain, strict=True))
    except ValidationError as error:
        keys = _Keys(kind)
        problems = [_explain(e, document, keys) for e in error.errors(include_url=False)]
        # Mistyped keys first: a required key that is missing is then explained already.
        problems.sort(key=lambda problem: not problem[2].startswith("did you mean"))
        raise document.refuse(problems) from None


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema of the dataclass `kind`."""
    return _Schema().generate(_core_schema(kind))


class _Schema(GenerateJsonSchema):
    """A JSON Schema that forbids unknown keys whatever the version of pydantic: not each says so of its own accord."""

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        return {"additionalProperties": False, **super().dataclass_schema(schema)}


def _core_schema(kind: type[Any]) -> CoreSchema:
    """What pydantic checks of the dataclass `kind` and those within, and we of them."""
    # pydantic takes rules for a dataclass from nothing but an attribute of it, yet those for any other type hold for
    # the dataclasses within: a new name for the class is such a type.
    adapter: TypeAdapter[Any] = TypeAdapter(NewType(kind.__name__, kind), config={"extra": "forbid"})  # type: ignore[arg-type]
    return cast("CoreSchema", _with_choices(adapter.core_schema, kind))


def _with_choices(node: Any, kind: type) -> Any:
    """A part of a schema, within that of the class `kind`, whose fields among `_CHOICES` take these texts alone."""
    if isinstance(node, list):
        return [_with_choices(item, kind) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("cls", kind)
    choices = _CHOICES.get((kind, node["name"])) if node.get("type") == "dataclass-field" else None
    if choices is None:
        return {key: _with_choices(item, kind) for key, item in node.items()}
    literal, inner = literal_schema(list(choices)), node["schema"]
    return {**node, "schema": {**inner, "schema": literal} if inner["type"] == "default" else literal}


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
}


class _Keys:
    """The keys that may stand at each place of a file."""

    def __init__(self, kind: type[Any]) -> None:
        self._schema = schema_of(kind)

    def at(self, place: KeyPath) -> list[str]:
        """Keys of the mapping at `place`; empty where there is none."""
        node: Any = self._schema
        for step in place:
            node = self._resolved(node)
            node = node.get("items", {}) if isinstance(step, int) else node.get("properties", {}).get(step, {})
        return list(self._resolved(node).get("properties", {}))

    def _resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        for option in node.get("anyOf", ()):
            if "$ref" in option:
                node = option
        name = node.get("$ref", "").rpartition("/")[2]
        mapping: dict[str, Any] = self._schema["$defs"][name] if name else node
        return mapping


def _explain(error: ErrorDetails, document: Document, keys: _Keys) -> Problem:
    # A union (`int | None`) appends the name of the member it tried: keep only what is in the file.
    at = tuple(error["loc"])
    kind = error["type"]
    if kind == "missing":
        return at, "is missing", "see `gpipe-plan schema` for the format"
    if kind == "unexpected_keyword_argument":
        absent = [key for key in keys.at(at[:-1]) if (*at[:-1], key) not in document.lines]
        near = [key for key in absent if key.startswith(f"{at[-1]}_")] or get_close_matches(str(at[-1]), absent, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "remove it; see `gpipe-plan schema` for the keys there are"
        return at, "unknown key", hint
    while at and document.lines and at not in document.lines:
        at = at[:-1]
    expected = _EXPECTED.get(kind)
    if kind == "literal_error":
        return at, f"expected {error['ctx']['expected']}, got {_shown(error['input'])}", ""
    if expected is None:
        return at, str(error["msg"])[:1].lower() + str(error["msg"])[1:], ""
    return at, f"expected {expected}, got {_shown(error['input'])}", ""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
