"""Schemas of tools, and calls of tools: `{"type": "function", "function": {...}}`, with arguments as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.parts.json_texts import structure, structures
from rollmesh.mesh.errors import DataError

_CALL_FORM = 'a call is {"type": "function", "function": {"name": ..., "arguments": {...}}}'


def read_tools(value: Any, field: str = "tools") -> list[dict[str, Any]]:
    """Schemas of tools; empty where there are none.

    Args:
        value: a list, its JSON text, or a list of JSON texts; functions may stand without their `type`.
        field: its name, for errors.

    Raises:
        DataError: it is something else.
    """
    return [_schema(tool, f"{field}[{place}]") for place, tool in enumerate(structures(value, field))]


def read_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as objects; empty where there are none.

    Args:
        value: a list or its JSON text; calls may be functions without their `type`, and arguments JSON text.
        field: its name, for errors.

    Raises:
        DataError: a call has no name, or arguments that are no object.
    """
    return [_call(call, f"{field}[{place}]") for place, call in enumerate(structures(value, field))]


def holds_calls(value: Any) -> bool:
    """True for a list of calls alone, or its JSON text: objects with name and arguments, and nothing else."""
    try:
        found = structures(value, "")
    except DataError:
        return False
    return bool(found) and all(set(call) <= {"name", "arguments", "id"} and len(call) > 1 for call in found)


def _schema(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if "function" not in tool and "name" in tool and tool.get("type", "function") == "function":
        # Templates read `tool.function`, and generators show tools so.
        tool = {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
    function = tool.get("function")
    if function is None:
        return tool
    function = _mapping(function, f"{field}.function")
    if isinstance(function.get("parameters"), str):
        parameters = structure(function["parameters"], f"{field}.function.parameters")
        function = {**function, "parameters": {} if parameters is None else parameters}
    return {**tool, "function": function}


def _call(call: dict[str, Any], field: str) -> dict[str, Any]:
    if "function" not in call and "name" in call:
        outer: dict[str, Any] = {name: call[name] for name in ("id", "index") if name in call}
        function = {name: value for name, value in call.items() if name not in (*outer, "type")}
        call = {**outer, "type": "function", "function": function}
    function = _mapping(call.get("function"), f"{field}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"field `{field}.function.name` is missing", hint=_CALL_FORM)
    key = "parameters" if "parameters" in function and "arguments" not in function else "arguments"
    arguments = _mapping(function.get(key), f"{field}.function.{key}", empty=True)
    others = {name: value for name, value in function.items() if name not in ("name", key)}
    return {"type": "function", **call, "function": {"name": function["name"], "arguments": arguments, **others}}


def _mapping(value: Any, field: str, *, empty: bool = False) -> dict[str, Any]:
    """An object, or its JSON text; where it may be empty, nothing is an empty one."""
    found = structure(value, field)
    if found is None and empty:
        return {}
    if not isinstance(found, Mapping):
        raise DataError(f"field `{field}` is {type(found).__name__}, expected an object", hint=_CALL_FORM)
    return dict(found)
