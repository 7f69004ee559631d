"""Conversations: a list of messages with `role` and `content`, calls of tools as objects.

Rows have them so, as ShareGPT's `from` and `value`, with OpenAI's earlier `function_call`, or as JSON text. A message
with calls may have no content: its `content` is then None.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.parts.json_texts import kind_of, structure
from rollmesh.learner.data.parts.tools import read_calls
from rollmesh.mesh.errors import DataError

_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_KNOWN = ("system", "developer", "user", "assistant", "tool")
_CALLS = ("function_call", "tool_call", "tool_calls")
# So like a speaker's name is a slip of the pen.
_NEAR = 0.8
_SHAREGPT_HINT = "`from` is system, human, gpt, function_call or observation"
# Clients write them as null where a message has none.
_OPTIONAL = (
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "audio",
    "annotations",
    "reasoning",
    "reasoning_content",
    "thinking",
)


def read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """The messages of a field, in the form that all later code takes; flags of turns stay where they are.

    Args:
        value: as the row has it: a list, a single message, or the JSON text of either; a message may be JSON text.
        field: its name, for errors.

    Raises:
        DataError: it is no conversation; names field and message.
    """
    if isinstance(value, list) and not value:
        return []
    found = structure(value, field)
    if found is None:
        raise DataError(f"field `{field}` is {kind_of(value)}, expected a list of messages")
    messages = []
    for place, given in enumerate(found if isinstance(found, list) else [found]):
        where = f"{field}[{place}]"
        message = structure(given, where) if _may_be_json(given, "{") else given
        if not isinstance(message, Mapping):
            raise DataError(f"field `{where}` is {kind_of(message)}, expected a message with `role` and `content`")
        messages.append(_message(message, where))
    return messages


def text_or_messages(value: Any, field: str) -> str | list[dict[str, Any]]:
    """A text, or messages; a text that is the JSON of a conversation is one.

    Raises:
        DataError: it is neither.
    """
    if not isinstance(value, str):
        if not isinstance(value, list | Mapping):
            kind = "missing" if value is None else kind_of(value)
            raise DataError(f"field `{field}` is {kind}, expected a text or a list of messages")
        return read_messages(value, field)
    if _may_be_json(value, "[") and ('"role"' in value or '"from"' in value):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        if isinstance(found, list) and found and all(map(_is_message, found)):
            return read_messages(found, field)
    return value


def text_of(message: Mapping[str, Any]) -> str:
    """The texts of a message, without white space around them."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return (content or "").strip()


def same_message(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two messages say the same, however their contents are written."""
    return (first["role"], text_of(first), first.get("tool_calls")) == (
        second["role"],
        text_of(second),
        second.get("tool_calls"),
    )


def _may_be_json(value: Any, start: str) -> bool:
    return isinstance(value, str) and value.lstrip().startswith(start)


def _is_message(value: Any) -> bool:
    """True for an object that can be nothing but a message."""
    if not isinstance(value, Mapping):
        return False
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    known = role in _ROLES or role in _KNOWN or role in _CALLS
    return known and (isinstance(content, str | list) or "tool_calls" in value or "function_call" in value)


def _message(given: Mapping[str, Any], field: str) -> dict[str, Any]:
    sharegpt = "role" not in given and "from" in given
    role = given.get("from") if sharegpt else given.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"field `{field}` is no message: it has no `role`")
    if (lowered := role.strip().lower()) in (*_KNOWN, *_ROLES, *_CALLS):
        role = lowered
    key = "value" if "content" not in given and (sharegpt or "value" in given) else "content"
    content, where = given.get(key), f"{field}.{key}"
    if role in _CALLS:
        role, calls, content = "assistant", read_calls(content, where), None
        if not calls:
            raise DataError(f"field `{field}` is a call of a tool, and names none")
    else:
        role = _ROLES.get(role, role)
        if sharegpt and role not in _KNOWN:
            raise DataError(f"field `{field}.from` is {role!r}, which is no speaker", hint=_SHAREGPT_HINT)
        if role not in _KNOWN and (near := difflib.get_close_matches(role.lower(), (*_KNOWN, *_ROLES), 1, _NEAR)):
            raise DataError(
                f"field `{field}.role` is {role!r}, which is no speaker, but nearly {near[0]!r}",
                hint=f"write {near[0]!r} if that is meant, or give a speaker of your own another name",
            )
        calls = _calls(given, field)
    # A call of a tool may stand alone.
    if not isinstance(content, str | list) and not (content is None and calls):
        absent = "is null" if key in given else "is missing"
        raise DataError(
            f"field `{where}` {absent if content is None else f'is {kind_of(content)}, which is not a string'}",
            hint="a message has its text as `content`; objects stand there as JSON text",
        )
    kept = {
        name: value
        for name, value in given.items()
        if name not in ("role", "content", "tool_calls", "function_call")
        and not (sharegpt and name in ("from", "value"))
        and not (value is None and name in _OPTIONAL)
    }
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {}), **kept}


def _calls(given: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    calls = read_calls(given.get("tool_calls"), f"{field}.tool_calls")
    return calls or read_calls(given.get("function_call"), f"{field}.function_call")
