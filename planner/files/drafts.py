"""The drafts of JSON Schema in which the schemas of our files are told."""

from typing import Any, Final, Literal, get_args

Draft = Literal["2020-12", "7"]

DRAFTS: Final[tuple[Draft, ...]] = get_args(Draft)


def in_draft(schema: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """A schema as pydantic makes it, which is of draft 2020-12, in the words of `draft`, and with its name."""
    if draft == "2020-12":
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_as_draft_07(schema)}


def _as_draft_07(node: Any) -> Any:
    # Of all that changed between the two our schemas have definitions and references (json-schema.org, release notes
    # of 2019-09 and 2020-12).
    if isinstance(node, list):
        return [_as_draft_07(item) for item in node]
    if not isinstance(node, dict):
        return node
    reworded = {"definitions" if key == "$defs" else key: _as_draft_07(item) for key, item in node.items()}
    if "$ref" not in reworded:
        return reworded
    reference = {"$ref": reworded.pop("$ref").replace("#/$defs/", "#/definitions/")}
    # Draft-07 heeds nothing that stands beside a reference, a default for instance.
    return {"allOf": [reference], **reworded} if reworded else reference
