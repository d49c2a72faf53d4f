"""Check the types of a file's plain content with pydantic-core, and explain errors."""

import json
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic_core import ErrorDetails, SchemaValidator, ValidationError

from planner.files.core_schemas import core_schema_of
from planner.files.strict_yaml import Document, KeyPath, Problem, dotted

_T = TypeVar("_T")


def validate_content(kind: type[_T], text: str, document: Document) -> _T:
    """Return a file's content as the dataclass `kind`, after a check of all keys and types.

    Args:
        kind: The dataclass.
        text: Content of the file as JSON text.
        document: The parsed file, for line numbers.

    Raises:
        FileError: Keys are unknown or missing, or have values of other types.
    """
    try:
        return cast("_T", SchemaValidator(core_schema_of(kind)).validate_json(text, strict=True))
    except ValidationError as error:
        problems = [_explain(e, document, kind) for e in error.errors(include_url=False)]
        # Unknown keys with a suggested spelling come first, because they also explain a missing key.
        problems.sort(key=lambda problem: not problem[2].startswith("did you mean"))
        raise document.error_for(problems) from None


def parse_json(kind: type[_T], text: bytes) -> _T:
    """Convert a JSON text to the dataclass `kind`.

    Raises:
        ValueError: The text is not JSON, a key is unknown or missing, or a value has another type.
    """
    try:
        return cast("_T", SchemaValidator(core_schema_of(kind)).validate_json(text, strict=True))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"`{dotted(first['loc'])}`: {first['msg']}" if first["loc"] else first["msg"]) from None


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


def _keys_at(kind: Any, path: KeyPath) -> list[str]:
    for step in path:
        if kind is not None and isinstance(step, str):
            kind = _dataclass_in(get_type_hints(kind).get(step))
    return [] if kind is None else [field.name for field in fields(kind)]


def _dataclass_in(annotation: Any) -> Any:
    if is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_dataclass_in, get_args(annotation))), None)


def _explain(error: ErrorDetails, document: Document, kind: type[Any]) -> Problem:
    # For a union (`int | None`), pydantic appends the name of the tried type; keep only keys that the file has.
    at = tuple(error["loc"])
    problem = error["type"]
    if problem == "missing":
        return at, "is missing", "see `gpipe-plan schema` for the format"
    if problem == "unexpected_keyword_argument":
        absent = [key for key in _keys_at(kind, at[:-1]) if (*at[:-1], key) not in document.lines]
        near = [key for key in absent if key.startswith(f"{at[-1]}_")] or get_close_matches(str(at[-1]), absent, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "remove it; see `gpipe-plan schema` for all keys"
        return at, "unknown key", hint
    while at and document.lines and at not in document.lines:
        at = at[:-1]
    expected = _EXPECTED.get(problem)
    if problem == "literal_error":
        return at, f"expected {error['ctx']['expected']}, got {_shown(error['input'])}", ""
    if expected is None:
        return at, str(error["msg"])[:1].lower() + str(error["msg"])[1:], ""
    return at, f"expected {expected}, got {_shown(error['input'])}", ""


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
