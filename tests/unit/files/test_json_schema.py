"""Published JSON Schemas, compared with the files that are read and written."""

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
    """Return the violations of the schema by `value`, for the part of JSON Schema that ours use."""
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
def test_written_files_conform_to_the_schema(kind: str) -> None:
    schema = json_schema(kind)
    assert conforms(json.loads(json.dumps(to_plain(KINDS[kind]()))), schema, schema) == []


@pytest.mark.parametrize("kind", KINDS)
def test_schema_describes_every_key(kind: str) -> None:
    """Every mapping except the settings is closed."""
    schema = json_schema(kind)
    objects = [schema, *schema["$defs"].values()]
    assert len(objects) > 3
    assert [
        o.get("title") for o in objects if o["type"] == "object" and o.get("additionalProperties") is not False
    ] == []
    assert set(to_plain(KINDS[kind]())) == set(schema["properties"])


@pytest.mark.parametrize("kind", KINDS)
def test_schema_has_its_dialect_and_its_id(kind: str) -> None:
    """Editors choose the dialect by `$schema`, and the schema of a file by the constant."""
    schema = json_schema(kind)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["schema"]["const"] == f"gpipe-plan/{kind}/v1"
    assert json.loads(json.dumps(schema)) == schema


def test_required_keys_of_profiles_and_layers() -> None:
    schema = json_schema("profile")
    assert set(schema["required"]) == {"schema", "device", "micro_batch_sizes", "layers"}
    assert set(schema["$defs"]["LayerProfile"]["required"]) == {
        *("name", "parameter_bytes", "forward_us", "backward_us", "output_bytes", "saved_bytes")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_schema_key_is_required(kind: str) -> None:
    """Files without this key are refused when read."""
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
def test_wrong_values_do_not_conform(key: str, value: Any) -> None:
    """This shows that `conforms` finds violations."""
    schema = json_schema("profile")
    plain = json.loads(json.dumps(to_plain(fullest_profile())))
    plain["layers"][1][key] = value
    assert conforms(plain, schema, schema) != []


def test_unknown_kinds_have_no_schema() -> None:
    with pytest.raises(KeyError):
        json_schema("nonsense")


def test_schemas_list_all_schedules() -> None:
    plan, balance = json_schema("plan"), json_schema("balance")
    names = [*SCHEDULES, SEARCHED.name]
    assert plan["properties"]["schedule"]["enum"] == balance["properties"]["schedule"]["enum"] == names
    assert plan["$defs"]["FrontierPoint"]["properties"]["schedule"]["enum"] == names
    assert plan["$defs"]["Inputs"]["properties"]["schedule"]["enum"] == [*SCHEDULE_CHOICES, GIVEN]
