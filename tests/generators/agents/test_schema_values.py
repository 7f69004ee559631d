"""Text arguments, read as the tool's schema says: every way in which schemas say it, and what stays text."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, create_model

from rollmesh.generators.agents.schema_values import ArgumentSchemas
from rollmesh.generators.agents.tool_calls import ToolCall, typed_arguments


class Point(BaseModel):
    x: int
    y: int = 0


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Level(IntEnum):
    LOW = 1
    HIGH = 2


def read(text: str, schema: Any, **document: Any) -> Any:
    """One argument's value."""
    call = ToolCall("f", {"a": text}, textual=True)
    return typed_arguments(call, {"type": "object", "properties": {"a": schema}, **document})["a"]


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (Point, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (Point | None, '{"x": 1}', {"x": 1}),
        (Point | None, "None", None),
        (Point | None, "null", None),
        (list[Point], '[{"x": 1}]', [{"x": 1}]),
        (list[Point], "[{'x': 1, 'y': None}]", [{"x": 1, "y": None}]),
        (dict[str, bool], "{'a': True, \"b\": false}", {"a": True, "b": False}),
        (Tree, '{"value": 1, "children": [{"value": 2}]}', {"value": 1, "children": [{"value": 2}]}),
        (Tree | Point, '{"x": 1}', {"x": 1}),
        (tuple[int, str], '[1, "a"]', [1, "a"]),
        (tuple[int, str], "(1, 'a')", [1, "a"]),
        (Level, "2", 2),
        (Level, "3", "3"),
        (Literal[1, "one"], "1", 1),
        (Literal[1, "one"], "one", "one"),
        (Literal["1", "2"], "1", "1"),
        (Literal[True], "True", True),
        (Literal[1], "true", "true"),
        (bool, "True", True),
        (bool, "false", False),
        (bool, "TRUE", True),
        (bool, "yes", "yes"),
        (bool | None, "None", None),
        (int, "3", 3),
        (int, "3.0", 3),
        (int, "3.5", "3.5"),
        (int, "true", "true"),
        (int, "1_000", "1_000"),
        (float, "3", 3),
        (float, "1e3", 1000.0),
        (float, "NaN", "NaN"),
        (float, "1e999", "1e999"),
        (list[float], "[1, Infinity]", "[1, Infinity]"),
        (int | str, "5", "5"),
        (bool | str, "True", "True"),
        (int | str | None, "null", None),
        (int | str, "007", "007"),
        (str | list[str], '["a", "b"]', ["a", "b"]),
        (str | list[str], "[a, b]", "[a, b]"),
        (str | None, "None", None),
        (str | None, "nothing", "nothing"),
        (str, "None", "None"),
        (str, '{"x": 1}', '{"x": 1}'),
        (str, '"quoted"', '"quoted"'),
        (Any, '{"x": 1}', '{"x": 1}'),
        (Point, "{x: 1}", "{x: 1}"),
        (Point, "3", "3"),
        (Point, "", ""),
        (Point, "{1: 2}", {"1": 2}),
        (list[int], "{1, 2}", "{1, 2}"),
        (list[int], "b'a'", "b'a'"),
    ],
)
def test_a_value_is_what_its_type_says(hint: Any, text: str, value: Any) -> None:
    schema = create_model("Arguments", a=(hint, ...)).model_json_schema()
    [found] = typed_arguments(ToolCall("f", {"a": text}, textual=True), schema).values()
    assert (found, type(found)) == (value, type(value))


REF = {"$ref": "#/$defs/P"}
DEFS = {
    "P": {"$ref": "#/$defs/Q~1R/inner"},
    "Q/R": {"inner": {"type": "object"}},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Ways": {"anyOf": [{"$ref": "#/$defs/Ways"}, {"type": "integer"}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (REF, '{"x": 1}', {"x": 1}),
        ({"allOf": [REF]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [REF, {"description": "a point"}]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "boolean"]}]}, "true", "true"),
        ({"anyOf": [REF, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"oneOf": [{"const": 1}, {"const": "a"}]}, "1", 1),
        ({"$ref": "#/definitions/P", "definitions": {"P": {"type": "array"}}}, "[1]", [1]),
        ({"$ref": "https://example.com/schema.json#/$defs/P"}, "{}", {}),
        ({"$ref": "#/$defs/Ways"}, "1", 1),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        ({"$ref": "#/$defs/Missing"}, "1", "1"),
        ({"$ref": "elsewhere.json"}, "1", "1"),
        ({"$ref": 7}, "1", "1"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
        ({"prefixItems": [{"type": "integer"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["a"]}]}, "7", 7),
        ({"enum": [1, None, "x"]}, "None", None),
        ({"enum": [[1, 2], {"a": 1}]}, "[1, 2]", [1, 2]),
        ({"const": {"a": 1}}, "{'a': 1}", {"a": 1}),
        ({"type": "dict"}, "{}", {}),
        ({"type": "any"}, "{}", "{}"),
        ({"type": 3, "enum": 4, "anyOf": 5, "allOf": None}, "1", "1"),
        (True, "1", "1"),
        (None, "1", "1"),
    ],
)
def test_every_way_to_say_it(schema: Any, text: str, value: Any) -> None:
    found = read(text, schema, **{"$defs": DEFS})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "integer"}}}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
)
def test_arguments_are_found_wherever_the_schema_has_them(parameters: Any) -> None:
    assert ArgumentSchemas(parameters).read("a", "1") == 1


@pytest.mark.parametrize(
    "parameters", [None, [], "object", {"properties": []}, {"$ref": "#"}, {"properties": {"b": {}}}]
)
def test_a_schema_that_says_nothing_leaves_text(parameters: Any) -> None:
    assert ArgumentSchemas(parameters).read("a", "1") == "1"


def test_values_that_the_model_has_typed_itself_stay() -> None:
    call = ToolCall("f", {"a": "1"})
    assert typed_arguments(call, {"properties": {"a": {"type": "integer"}}}) == {"a": "1"}


@pytest.mark.timeout(60)
def test_schemas_that_refer_to_each_other_without_end_are_read_in_no_time() -> None:
    ways = {"anyOf": [{"$ref": f"#/$defs/{index}"} for index in range(40)]}
    assert read("1", ways, **{"$defs": {str(index): dict(ways) for index in range(40)}}) == "1"
    deep: Any = {"type": "integer"}
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert read("1", deep) == "1"


@given(st.text("{}[]\"':,1etrufalsN \\", max_size=30), st.sampled_from(["object", "array", "number", "boolean"]))
def test_whatever_is_read_can_be_written(text: str, kind: str) -> None:
    json.dumps(read(text, {"type": [kind, "null"]}), allow_nan=False)
