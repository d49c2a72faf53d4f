"""Generate JSON Schemas of the file formats, with pydantic."""

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema


class JsonSchema(GenerateJsonSchema):
    """Generator of JSON Schemas that forbid unknown keys, which some versions of pydantic allow."""

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        """Return the JSON Schema of one dataclass."""
        return {"additionalProperties": False, **super().dataclass_schema(schema)}
