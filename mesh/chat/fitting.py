"""Messages in the form in which a template writes all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.mesh.chat.facts import ContentForm, TemplateFacts
from rollmesh.mesh.chat.template import Message
from rollmesh.mesh.chat.thoughts import THOUGHT_FIELDS, thoughts_of
from rollmesh.mesh.errors import ChatTemplateError

_LETTERS_OF_ID = 9


def fit(messages: Sequence[Message], facts: TemplateFacts) -> list[dict[str, Any]]:
    """Messages with contents, arguments and ids of calls as a template takes them; the meaning stays.

    Args:
        messages: contents are texts or lists of parts; arguments are objects or JSON texts.
        facts: of the template.

    Raises:
        ChatTemplateError: the template cannot write one of them.
    """
    if facts.nine_letter_ids:
        messages = _with_ids(messages)
    return [_fit(message, facts, index) for index, message in enumerate(messages)]


def _with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in which each call has an id; results without one answer the calls before them in order."""
    found, open_calls = [], list[str]()
    for index, message in enumerate(messages):
        named = dict(message)
        if calls := message.get("tool_calls"):
            named["tool_calls"] = [
                {**call, "id": call.get("id") or f"call {place} of message {index}"} for place, call in enumerate(calls)
            ]
            open_calls = [str(call["id"]) for call in named["tool_calls"]]
        if message.get("role") == "tool":
            if not message.get("tool_call_id") and open_calls:
                named["tool_call_id"] = open_calls[0]
            open_calls = [call for call in open_calls if call != named.get("tool_call_id")]
        found.append(named)
    return found


def not_written(index: int, role: str, facts: TemplateFacts) -> ChatTemplateError:
    """The error for a message of which the template writes nothing."""
    known = ", ".join(facts.contents)
    remedies = {
        "system": "put the words of a system message into the user's",
        "developer": "put the words of a system message into the user's",
        "tool": "use a template for tools",
    }
    return ChatTemplateError(
        f"message {index} has the role {role}, and the chat template does not write it",
        hint=remedies.get(role, f"give it a role that the template writes: {known}"),
    )


def _fit(message: Message, facts: TemplateFacts, index: int) -> dict[str, Any]:
    fitted = dict(message)
    role = str(message.get("role"))
    if role == "developer" and role not in facts.contents:
        # Providers read it as a system message wherever they know no developer.
        role = fitted["role"] = "system"
    forms = facts.contents.get(role, ())
    if role not in ("system", "tool"):
        # A role that was not asked about is written as all are, if at all.
        forms = forms or facts.contents["user"]
    elif not forms:
        raise not_written(index, str(message["role"]), facts)
    if "content" in message:
        fitted["content"] = _content(message["content"], forms, index)
    if calls := message.get("tool_calls"):
        if not facts.arguments:
            raise ChatTemplateError(
                f"message {index} calls a tool, and the chat template does not write calls",
                hint="use a template for tools, or rows without calls",
            )
        fitted["tool_calls"] = [_call(call, facts) for call in calls]
    if facts.thoughts_field and facts.thoughts_field not in message and (thoughts := thoughts_of(message)):
        fitted = {name: value for name, value in fitted.items() if name not in THOUGHT_FIELDS}
        fitted[facts.thoughts_field] = thoughts
    if facts.nine_letter_ids and isinstance(given := message.get("tool_call_id"), str):
        fitted["tool_call_id"] = _nine_letters(given)
    return fitted


def _content(content: Any, forms: Sequence[ContentForm], index: int) -> Any:
    if isinstance(content, str):
        return content if "text" in forms or not forms else [{"type": "text", "text": content}]
    if isinstance(content, list) and "text" in forms and ("parts" not in forms or all(map(_is_text, content))):
        return "".join(_text_of(part, index) for part in content)
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text"


def _text_of(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if _is_text(part) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ChatTemplateError(
            f"message {index} has a part of type {kind}, and the chat template writes texts alone",
            hint="remove the part, or use a model with a template for it",
        )
    return text


def _call(call: Any, facts: TemplateFacts) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if facts.arguments == "object" and isinstance(arguments, str):
        arguments = _decoded(arguments)
    elif facts.arguments == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    fitted = {**function, "arguments": arguments}
    whole = {**call, "function": fitted} if "function" in call else fitted
    if facts.nine_letter_ids:
        whole["id"] = _nine_letters(str(call["id"]))
    return whole


def _decoded(arguments: str) -> Any:
    """The object that a JSON text holds. Another text, such as a model's own mistake, stays."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _nine_letters(given: str) -> str:
    """An id of nine letters and digits: the same for the same id."""
    if len(given) == _LETTERS_OF_ID and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:_LETTERS_OF_ID]
