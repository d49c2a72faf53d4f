"""Build pydantic-core schemas of dataclasses from the types of their fields.

Pydantic's own generator builds equal schemas (`tests/unit/files/test_core_schemas.py` compares them), but is slow. The
dataclasses of files need only a few types: numbers, texts, literals, tuples, mappings, and dataclasses.
"""

import builtins
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, core_schema

from planner.core.schedule import GIVEN, SCHEDULE_CHOICES, SCHEDULES, SEARCHED

_CHOICES: Final[dict[tuple[str, str], Sequence[str]]] = {
    ("Balance", "schedule"): (*SCHEDULES, SEARCHED.name),
    ("FrontierPoint", "schedule"): (*SCHEDULES, SEARCHED.name),
    ("Inputs", "schedule"): (*SCHEDULE_CHOICES, GIVEN),
    ("Plan", "schedule"): (*SCHEDULES, SEARCHED.name),
}
"""Allowed texts by class and field, which `planner.core.values` cannot declare because it cannot import schedules."""


_SCALARS: Final[dict[type, Callable[[], CoreSchema]]] = {
    bool: core_schema.bool_schema,
    float: core_schema.float_schema,
    int: core_schema.int_schema,
    str: core_schema.str_schema,
}


def core_schema_of(kind: type[Any]) -> CoreSchema:
    """Return a schema for the dataclass `kind`: its fields as the only keys, with their types."""
    classes: dict[type[Any], CoreSchema] = {}
    whole = _typed(kind, classes)
    return core_schema.definitions_schema(whole, list(classes.values()))


def _typed(annotation: Any, classes: dict[type[Any], CoreSchema]) -> CoreSchema:
    if annotation in _SCALARS:
        return _SCALARS[annotation]()
    if is_dataclass(annotation):
        assert isinstance(annotation, type)
        if annotation not in classes:
            classes[annotation] = core_schema.none_schema()  # placeholder, in case the dataclass contains itself
            classes[annotation] = _dataclass(annotation, classes)
        return core_schema.definition_reference_schema(_reference(annotation))
    of = get_args(annotation)
    match get_origin(annotation):
        case typing.Literal:
            schema: CoreSchema = core_schema.literal_schema(list(of))
        case typing.Union | types.UnionType:
            members = [_typed(member, classes) for member in of if member is not NoneType]
            schema = members[0] if len(members) == 1 else core_schema.union_schema([*members])
            schema = core_schema.nullable_schema(schema) if NoneType in of else schema
        case builtins.tuple:
            items = [_typed(item, classes) for item in of if item is not Ellipsis]
            variadic = len(items) - 1 if Ellipsis in of else None
            schema = core_schema.tuple_schema(items, variadic_item_index=variadic)
        case builtins.dict:
            schema = core_schema.dict_schema(*(_typed(item, classes) for item in of))
        case _:
            raise TypeError(f"no file holds a {annotation}")
    return schema


def _dataclass(kind: type[Any], classes: dict[type[Any], CoreSchema]) -> CoreSchema:
    hints = get_type_hints(kind)
    inner = core_schema.dataclass_args_schema(
        kind.__name__,
        [
            core_schema.dataclass_field(of.name, _field(kind, of, _typed(hints[of.name], classes)))
            for of in fields(kind)
        ],
    )
    return core_schema.dataclass_schema(
        kind,
        inner,
        [of.name for of in fields(kind)],
        ref=_reference(kind),
        slots=True,
        config=core_schema.CoreConfig(title=kind.__name__, extra_fields_behavior="forbid"),
    )


def _field(kind: type[Any], of: "Field[Any]", typed: CoreSchema) -> CoreSchema:
    choices = _CHOICES.get((kind.__name__, of.name))
    schema = typed if choices is None else core_schema.literal_schema(list(choices))
    if of.default is not MISSING:
        return core_schema.with_default_schema(schema, default=of.default)
    if of.default_factory is not MISSING:
        return core_schema.with_default_schema(schema, default_factory=of.default_factory)
    return schema


def _reference(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}:{id(kind)}"
