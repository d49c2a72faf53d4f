"""Core schemas derived from our classes, compared with those that pydantic derives."""

from dataclasses import fields
from typing import Any, NewType

import pytest
from pydantic import TypeAdapter

from planner.core.values import balance, plan, profile, run_report
from planner.files import core_schemas
from planner.files.core_schemas import core_schema_of
from planner.files.kinds import KINDS

QUIET = {
    "collect_init_only": False,
    "computed_fields": [],
    "default_factory_takes_data": False,
    "frozen": False,
    "init": True,
    "metadata": {},
    "post_init": False,
}
"""Entries of pydantic's schemas that have their default value."""


def plainly(node: Any, definitions: dict[str, Any]) -> Any:
    """Return the schema with classes inlined and default values removed."""
    if isinstance(node, list):
        return [plainly(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "definitions":
        inner = {**definitions, **{each["ref"]: each for each in node["definitions"]}}
        return plainly(node["schema"], inner)
    if node.get("type") == "definition-ref":
        return plainly(definitions[node["schema_ref"]], definitions)
    said = {key: item for key, item in node.items() if key != "ref" and (key not in QUIET or item != QUIET[key])}
    return {key: plainly(item, definitions) for key, item in said.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_core_schemas_equal_those_of_pydantic(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of schedules are the exception, because the classes do not list them."""
    monkeypatch.setattr(core_schemas, "_CHOICES", {})
    of = KINDS[kind].value_class
    theirs: TypeAdapter[Any] = TypeAdapter(NewType(of.__name__, of), config={"extra": "forbid"})
    ours = plainly(core_schema_of(of), {})
    assert ours == plainly(theirs.core_schema, {})
    assert ours["cls"] is of


def test_types_without_a_file_representation_are_refused() -> None:
    with pytest.raises(TypeError, match="no file holds"):
        core_schemas._typed(set[int], {})


def test_classes_with_schedule_names_have_the_fields() -> None:
    for name, field in core_schemas._CHOICES:
        (of,) = {vars(room)[name] for room in (balance, plan, profile, run_report) if name in vars(room)}
        assert field in {each.name for each in fields(of)}, name
