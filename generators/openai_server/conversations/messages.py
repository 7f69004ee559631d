"""Chat messages in one normal form.

Invariant: an assistant's message that a client sends back unchanged has the form of the answer that went out. The
client's library may turn it into any object or dictionary: fields without a value do not count.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rollmesh.generators.openai_server.errors import ApiError

Message = dict[str, Any]
THOUGHTS = "reasoning_content"
"""The key of thoughts that a client keeps apart from an assistant's content; templates know it by this name."""
_THOUGHT_FIELDS = (THOUGHTS, "reasoning", "thinking")
_THOUGHT_LISTS = ("thinking_blocks", "reasoning_details")
_THOUGHT_PARTS = ("thinking", "reasoning", "reasoning.text")
_TEXT_PARTS = ("text", "refusal")


def normalize(message: Message, index: int = 0) -> Message:
    """A message as chat templates take it: contents are text, arguments of tool calls are objects.

    Raises:
        ApiError: 400: content that is not text.
    """
    normal: Message = {"role": "system" if message["role"] == "developer" else message["role"]}
    kept = message.get("content")
    apart: list[Any] = []
    if normal["role"] == "assistant" and isinstance(kept, list):
        apart = list(filter(_has_thoughts, kept))
        kept = [part for part in kept if part not in apart]
    content = _text(kept, index)
    calls = message.get("tool_calls") or []
    if content is not None or not calls:
        normal["content"] = content or ""
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            normal[name] = message[name]
    if normal["role"] == "assistant" and (thoughts := _thoughts(message, apart)):
        normal[THOUGHTS] = thoughts
    if calls:
        normal.setdefault("content", "")
        if not isinstance(calls, list):
            raise ApiError(400, "the tool calls of a message are a list", param=f"messages[{index}].tool_calls")
        normal["tool_calls"] = [_call(call, index) for call in calls]
    return normal


def _text(content: Any, index: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise ApiError(
                400, "only text is understood", reason="unsupported_content", param=f"messages[{index}].content"
            )
        parts.append(str(part.get(part["type"], "")))
    return "".join(parts)


def _thoughts(message: Message, parts: list[Any]) -> str:
    """The thoughts that stand outside of an assistant's content; clients name them in several ways, some in two."""
    fields = (message.get(name) for name in _THOUGHT_FIELDS)
    found = next((value for value in fields if isinstance(value, str) and value.strip()), "")
    lists = (message.get(name) for name in _THOUGHT_LISTS)
    parts = parts or next((value for value in lists if isinstance(value, list)), [])
    texts = (part.get("thinking") or part.get("reasoning") or part.get("text") for part in parts if _has_thoughts(part))
    return found or "".join(text for text in texts if isinstance(text, str))


def _has_thoughts(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _THOUGHT_PARTS


def _call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a tool call needs a function with a name", param=f"messages[{index}].tool_calls")
    arguments = read_arguments(function.get("arguments") or {})
    tool_call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **tool_call} if isinstance(call.get("id"), str) else tool_call


def read_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object, also where they are JSON text.

    A model's own mistake, handed back, is no JSON: it stays the text that it is.
    """
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments
