"""The published JSON Schema describes what is read and written."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from planner.core.schedule import GIVEN, SCHEDULE_CHOICES, SCHEDULES, SEARCHED
from planner.files import json_schema, to_plain
from tests.support.file_values import (
    full_balance,
    full_calibration,
    full_links,
    full_partial,
    full_run,
    fullest_plan,
    fullest_profile,
)

KINDS: dict[str, Callable[[], Any]] = {
    "profile": fullest_profile,
    "plan": fullest_plan,
    "run": full_run,
    "balance": full_balance,
    "links": full_links,
    "calibration": full_calibration,
    "partial": full_partial,
}


def conforms(  # noqa: C901, PLR0911 - one rule of JSON Schema after the other
    value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = ""
) -> list[str]:
    """What of `value` the schema does not allow: as much of JSON Schema as our schemas use."""
    if "$ref" in schema:
        where, name = schema["$ref"].removeprefix("#/").split("/")
        return conforms(value, root[where][name], root, at)
    if "anyOf" in schema:
        found = [conforms(value, option, root, at) for option in schema["anyOf"]]
        return [] if [] in found else [f"{at}: none of {len(found)} options"]
    if "const" in schema:
        return [] if value == schema["const"] else [f"{at}: not {schema['const']}"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: not in {schema['enum']}"]
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    kind = schema["type"]
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return [f"{at}: not of type {kind}"]
    if kind == "array":
        return [p for n, item in enumerate(value) for p in conforms(item, schema["items"], root, f"{at}[{n}]")]
    if kind != "object":
        return []
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    problems = [f"{at}.{key}: missing" for key in schema.get("required", []) if key not in value]
    for key, item in value.items():
        if key in properties:
            problems += conforms(item, properties[key], root, f"{at}.{key}")
        elif others is False:
            problems.append(f"{at}.{key}: unknown")
        elif isinstance(others, dict):
            problems += conforms(item, others, root, f"{at}.{key}")
    return problems


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_conforms(kind: str) -> None:
    """Every field of every kind of file."""
    schema = json_schema(kind)
    assert conforms(json.loads(json.dumps(to_plain(KINDS[kind]()))), schema, schema) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_may_stand_in_a_file_is_described(kind: str) -> None:
    """No key of a full file is allowed only because anything is; every mapping but the settings is closed."""
    schema = json_schema(kind)
    objects = [schema, *schema["$defs"].values()]
    assert len(objects) > 3
    assert [
        o.get("title") for o in objects if o["type"] == "object" and o.get("additionalProperties") is not False
    ] == []
    assert set(to_plain(KINDS[kind]())) == set(schema["properties"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_names_its_dialect_and_its_file(kind: str) -> None:
    """Editors pick the dialect by `$schema`, a file its schema by the constant."""
    schema = json_schema(kind)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["schema"]["const"] == f"gpipe-plan/{kind}/v1"
    assert json.loads(json.dumps(schema)) == schema


def test_required_keys_are_those_the_format_names() -> None:
    """Of a profile and of a layer; all else may be left out of a file written by hand."""
    schema = json_schema("profile")
    assert set(schema["required"]) == {"schema", "device", "micro_batch_sizes", "layers"}
    assert set(schema["$defs"]["LayerProfile"]["required"]) == {
        *("name", "parameter_bytes", "forward_us", "backward_us", "output_bytes", "saved_bytes")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_editor_asks_for_the_schema_key(kind: str) -> None:
    """A file without it is refused, so the JSON Schema must require it too: what validates there can be read here."""
    assert "schema" in json_schema(kind)["required"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parameter_bytes", 1.5),
        ("parameter_bytes", "12"),
        ("forward_us", 1),
        ("name", 3),
        ("unknown", 1),
        ("tied", "a"),
    ],
)
def test_a_wrong_value_does_not_conform(key: str, value: Any) -> None:
    """The little validator above does refuse, so that the first test can fail."""
    schema = json_schema("profile")
    plain = json.loads(json.dumps(to_plain(fullest_profile())))
    plain["layers"][1][key] = value
    assert conforms(plain, schema, schema) != []


def test_an_unknown_kind_is_no_schema() -> None:
    """There are four."""
    with pytest.raises(KeyError):
        json_schema("nonsense")


def test_schedules_are_those_that_there_are() -> None:
    """A new one needs no change of values or files."""
    plan, balance = json_schema("plan"), json_schema("balance")
    names = [*SCHEDULES, SEARCHED.name]
    assert plan["properties"]["schedule"]["enum"] == balance["properties"]["schedule"]["enum"] == names
    assert plan["$defs"]["FrontierPoint"]["properties"]["schedule"]["enum"] == names
    assert plan["$defs"]["Inputs"]["properties"]["schedule"]["enum"] == [*SCHEDULE_CHOICES, GIVEN]
