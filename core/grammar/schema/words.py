"""Types and keywords by what they are about. Light: the front reads tools with it, and no more of this package."""

from __future__ import annotations

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ARRAY_KEYWORDS = ("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems")
CONTAINS_KEYWORDS = ("contains", "minContains", "maxContains")
OBJECT_KEYWORDS = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
)  # fmt: skip
