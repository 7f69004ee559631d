"""`response_format`: the schema that an answer in JSON has to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.generators.openai_server.errors import ApiError

_FIELD = "response_format"
_FORMS = (
    'response_format is {"type": "text"}, {"type": "json_object"}, or '
    '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
)


def answer_schema(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema of an answer; None: it is any text.

    Raises:
        ApiError: 400: there is no such form.
    """
    form = response_format if isinstance(response_format, Mapping) else {}
    kind = form.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise ApiError(400, _FORMS, reason="invalid_value", param=_FIELD)
    return schema
