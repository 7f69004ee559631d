"""The last request of a short conversation with each agent framework: the forms are recorded, the words our own.

The model has called `lookup` twice, the second time after thoughts where that was allowed. `python -m
benchmarks.agents.frameworks` has the frameworks themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request.

    Attributes:
        body: as the framework sends it.
        answers: that the endpoint had given before, as it gave them.
        calls: names of tools of which one has to be called.
        schema: whether JSON has to be answered.
        forced: fields that training ignores.
    """

    body: dict[str, Any]
    answers: list[dict[str, Any]]
    calls: tuple[str, ...] = ()
    schema: bool = False
    forced: tuple[str, ...] = field(default=())


def call(arguments: Any, call_id: str, name: str = "lookup", **more: Any) -> dict[str, Any]:
    """A call of a tool."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


THOUGHTS = "<think>\nOnce more.\n</think>"
FIRST, SECOND = '{"key": "first"}', '{"key": "417"}'
TIGHT = [json.dumps(json.loads(arguments), separators=(",", ":")) for arguments in (FIRST, SECOND)]
# As the endpoint gives them.
PLAIN: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call(FIRST, "call_a")]},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call(SECOND, "call_b")]},
]
THOUGHT = [PLAIN[0], {**PLAIN[1], "content": THOUGHTS}]
USER = {"role": "user", "content": "Look it up."}


def results(first: str = "call_a", second: str = "call_b", **more: Any) -> list[dict[str, Any]]:
    """The results of both calls."""
    return [
        {"role": "tool", "tool_call_id": call_id, "content": content, **more}
        for call_id, content in ((first, "417"), (second, "923"))
    ]


def conversation(*said: dict[str, Any], user: Any = USER, told: Any = None, first: Any = ()) -> list[dict[str, Any]]:
    """Messages of both calls and their results."""
    told = results() if told is None else told
    return [*first, user, said[0], told[0], said[1], told[1]]


def tools(*more: dict[str, Any], strict: bool = False, **schema: Any) -> list[dict[str, Any]]:
    """The list of tools, with `lookup` first."""
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"], **schema}
    function = {"name": "lookup", "description": "Looks up.", "parameters": parameters} | (
        {"strict": True} if strict else {}
    )
    return [{"type": "function", "function": function}, *more]


def tool(name: str, kind: str, argument: str, **more: Any) -> dict[str, Any]:
    """A tool with one argument."""
    parameters = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument], **more}
    return {"type": "function", "function": {"name": name, "description": "Ends.", "parameters": parameters}}


def form(strict: bool = True, **properties: Any) -> dict[str, Any]:
    """`response_format` with a schema."""
    listed = {name: {"type": kind, "title": name.title()} for name, kind in properties.items()}
    schema = {
        "type": "object", "title": "Form", "properties": listed, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "Form", "schema": schema, "strict": strict}}


def texts(role: str, text: str) -> dict[str, Any]:
    """A message of parts."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CODES = ['half = lookup(key="first")\nprint(half)', 'whole = lookup(key="417")\nprint(whole)']
WRITTEN = [f"Thought: I look.\n<code>\n{code}\n" for code in CODES]
AS_JSON = [json.dumps({"thought": "I look.", "code": code}) for code in CODES]
STOPS = ["Observation:", "Calling tools:"]


def retold(index: int, code: str) -> str:
    """Code told once more, as a call in Python's form."""
    made = [call(code, f"call_{index + 1}", "python_interpreter")]
    return f"Calling tools:\n{made}"


def code_agent(answers: list[str], end: str, **more: Any) -> Recorded:
    """The agent of smolagents that writes code."""
    messages = [texts("system", "Write code."), texts("user", "New task:\nLook it up.")]
    for index, (answer, code, said) in enumerate(zip(answers, CODES, ("417", "923"), strict=True)):
        messages.append(texts("assistant", f"{answer}{end}\n{retold(index, code)}"))
        messages.append(texts("user", f"Observation:\nExecution logs:\n{said}\nLast output from code snippet:\nNone"))
    given = [{"role": "assistant", "content": answer} for answer in answers]
    return Recorded(
        {"messages": messages, "stop": [*STOPS, "</code>"], **more}, given, schema="response_format" in more
    )


def tool_agent(space: str, **more: Any) -> Recorded:
    """The agent of smolagents that calls tools: it tells them as text."""
    messages = [texts("system", "Call tools."), texts("user", "New task:\nLook it up.")]
    for arguments, call_id, said in ((FIRST, "call_a", "417"), (SECOND, "call_b", "923")):
        messages.append(texts("assistant", f"{space}Calling tools:\n{[call(json.loads(arguments), call_id)]}"))
        messages.append(texts("user", f"Observation:\n{said}"))
    body = {"messages": messages, "stop": STOPS, "tools": tools(tool("final_answer", "string", "answer")), **more}
    return Recorded({**body, "tool_choice": "required"}, PLAIN, calls=("lookup", "final_answer"))


REQUESTS: dict[str, Recorded] = {
    "openai": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "tool_calls": [call(FIRST, "call_a")]},
                {"role": "assistant", "content": THOUGHTS, "tool_calls": [call(SECOND, "call_b")]},
            ),
            "tools": tools(),
        },
        THOUGHT,
    ),
    "openai, a stream's answer with parsed arguments": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "content": None, "refusal": None, "parsed": None, "tool_calls": [
                    {"id": "call_a", "type": "function", "index": 0,
                     "function": {"name": "lookup", "arguments": FIRST, "parsed_arguments": None}}]},
                {"role": "assistant", "content": THOUGHTS, "refusal": None, "parsed": None, "tool_calls": [
                    call(SECOND, "call_b", index=0)]},
            ),
            "tools": tools(),
            **STREAM,
        },
        THOUGHT,
    ),
    "openai, an answer of a form": Recorded(
        {"messages": [USER], "response_format": form(number="integer"), "stream": False}, [], schema=True
    ),
    "LiteLLM, thoughts apart": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "content": "", "tool_calls": [call(FIRST, "call_a")]},
                {"role": "assistant", "content": "", "reasoning_content": "\nOnce more.\n",
                 "tool_calls": [call(SECOND, "call_b", index=0)], "provider_specific_fields": {"refusal": None}},
            ),
            "tools": tools(),
            "stream": True,
        },
        THOUGHT,
    ),
    "LangChain": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "content": None, "tool_calls": [call(FIRST, "call_a")]},
                {"role": "assistant", "content": THOUGHTS, "tool_calls": [call(SECOND, "call_b")]},
            ),
            "tools": tools(),
            "stream": False,
        },
        THOUGHT,
    ),
    "LangChain, with_structured_output by a function": Recorded(
        {
            "messages": [USER],
            "tools": [tool("Form", "integer", "number")],
            "tool_choice": {"type": "function", "function": {"name": "Form"}},
            "parallel_tool_calls": False,
            "stream": False,
        },
        [],
        calls=("Form",),
    ),
    "OpenAI Agents SDK": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "tool_calls": [call(FIRST, "call_a")]},
                {"role": "assistant", "content": THOUGHTS, "tool_calls": [call(SECOND, "call_b")]},
                first=[{"role": "system", "content": "Help."}],
            ),
            "tools": tools(strict=True, additionalProperties=False),
            **STREAM,
        },
        THOUGHT,
    ),
    "OpenAI Agents SDK with output_type": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "tool_calls": [call(FIRST, "call_a")]},
                {"role": "assistant", "tool_calls": [call(SECOND, "call_b")]},
                first=[{"role": "system", "content": "Help."}],
            ),
            "tools": tools(strict=True, additionalProperties=False),
            "response_format": form(number="integer"),
            "stream": False,
        },
        PLAIN,
        schema=True,
    ),
    "Pydantic AI": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "content": None, "tool_calls": [call(TIGHT[0], "call_a")]},
                {"role": "assistant", "content": "<think>\n\nOnce more.\n\n</think>",
                 "tool_calls": [call(TIGHT[1], "call_b")]},
            ),
            "tools": tools(strict=True, additionalProperties=False),
            "tool_choice": "auto",
            **STREAM,
        },
        THOUGHT,
    ),
    "Pydantic AI with output_type": Recorded(
        {
            "messages": conversation(
                {"role": "assistant", "content": None, "tool_calls": [call(TIGHT[0], "call_a")]},
                {"role": "assistant", "content": None, "tool_calls": [call(TIGHT[1], "call_b")]},
            ),
            "tools": tools(tool("final_result", "integer", "number", additionalProperties=False), strict=True),
            "tool_choice": "required",
            "stream": False,
        },
        PLAIN,
        calls=("lookup", "final_result"),
    ),
    "smolagents CodeAgent": code_agent(WRITTEN, "</code>"),
    "smolagents CodeAgent, streamed": code_agent(WRITTEN, "</code>", **STREAM),
    "smolagents CodeAgent, structured": code_agent(AS_JSON, "", response_format=form(thought="string", code="string")),
    "smolagents ToolCallingAgent": tool_agent(""),
    "smolagents ToolCallingAgent, streamed": tool_agent("\n", **STREAM),
    "DSPy": Recorded(
        {
            "messages": [{"role": "system", "content": "Your fields are:"}, USER],
            "temperature": 0.7,
            "max_tokens": 1000,
            **STREAM,
        },
        [],
        forced=("temperature",),
    ),
}  # fmt: skip
