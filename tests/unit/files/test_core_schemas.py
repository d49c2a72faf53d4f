"""The schemas that we derive from our classes, held against those that pydantic derives."""

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
"""What pydantic also says of a class, though it would be so if nothing were said."""


def plainly(node: Any, definitions: dict[str, Any]) -> Any:
    """A schema in which each class stands where it is used, without what goes without saying."""
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
def test_it_is_the_schema_that_pydantic_derives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of file, but for the names of schedules, of which the classes say nothing."""
    monkeypatch.setattr(core_schemas, "_CHOICES", {})
    of = KINDS[kind].value_class
    theirs: TypeAdapter[Any] = TypeAdapter(NewType(of.__name__, of), config={"extra": "forbid"})  # type: ignore[arg-type]
    ours = plainly(core_schema_of(of), {})
    assert ours == plainly(theirs.core_schema, {})
    assert ours["cls"] is of


def test_a_type_that_no_file_holds_is_refused() -> None:
    """Rather than read as anything."""
    with pytest.raises(TypeError, match="no file holds"):
        core_schemas._typed(set[int], {})


def test_classes_that_are_told_by_name_have_the_fields() -> None:
    """Those of which a field takes a schedule's name."""
    for name, field in core_schemas._CHOICES:
        (of,) = {vars(room)[name] for room in (balance, plan, profile, run_report) if name in vars(room)}
        assert field in {each.name for each in fields(of)}, name
