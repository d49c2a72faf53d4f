"""The JSON Schema of our files, as pydantic makes it."""

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema


class JsonSchema(GenerateJsonSchema):
    """A JSON Schema that forbids unknown keys whatever the version of pydantic: not each says so of its own accord."""

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        """The schema of one class in it."""
        return {"additionalProperties": False, **super().dataclass_schema(schema)}
