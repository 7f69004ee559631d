"""Rows of supervised fine-tuning: conversations, prompts with responses, or texts.

Forms (TRL's, verl's for SFT, ShareGPT's): `messages` or `conversations`, with `tools`; a prompt and a response, each a
text or messages; `text`. Responses and texts end with the tokenizer's end token, conversations as
the chat template ends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollmesh.learner.data.chat_turns import ChatEncoder, Messages
from rollmesh.learner.data.examples import Example, ExampleForm, LeftOut, sequence_of
from rollmesh.learner.data.parts.answers import AS_CHAT, Text, messages_of
from rollmesh.learner.data.parts.messages import read_messages
from rollmesh.learner.data.parts.shown_tools import shown_tools, tools_of
from rollmesh.learner.data.parts.template_arguments import read_template_arguments
from rollmesh.learner.data.parts.template_marks import TemplateMarks
from rollmesh.learner.data.parts.tools import holds_calls, read_calls
from rollmesh.learner.data.parts.turn_flags import trained_turns, without_flags
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_fields import read_field, refuse_beside_texts, value_at, with_system
from rollmesh.mesh.config.trainers.sections import SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.masked_text import MaskedTokens, continuation

_RESPONSES = ("completion", "response")
_CONVERSATIONS = ("conversations", "conversation")
_FORMS = (
    "rows need `messages`, `text`, or a prompt with `completion` or `response`; data.prompt_key and data.response_key "
    "name other fields of these two"
)
_PAIRS = "pairs are for `rollmesh dpo` and `rollmesh rm`"


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the response to it, both texts.

    Attributes:
        prompt: empty, where all of a text is trained.
        response: without an end token.
    """

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, with turns to train.

    Attributes:
        messages: all of them.
        turns: indices of the assistant's messages that are trained.
        tools: schemas of tools that the template shows.
        arguments: further ones of the template.
    """

    messages: Messages
    turns: Sequence[int]
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


class SupervisedForm(ExampleForm):
    """The form of a source's conversations, responses or texts.

    Args:
        chat: encodes conversations.
        section: forms of the rows, and their longest.
        prompt_key: field of the prompt.
    """

    def __init__(self, chat: ChatEncoder, section: SupervisedRowsSection, prompt_key: str) -> None:
        self._chat = chat
        self._marks = TemplateMarks(chat.tokenizer)
        self._section = section
        self._prompt_key = prompt_key

    def read(self, record: Record) -> Continuation | Conversation:
        if record.get("messages") is not None:
            return self._conversation(_messages(record, "messages"), 0, record)
        if (response_key := self._response_key(record)) is not None:
            return self._response(record, response_key)
        if (key := next((key for key in _CONVERSATIONS if record.get(key) is not None), None)) is not None:
            return self._conversation(_messages(record, key), 0, record)
        if isinstance(text := record.get("text"), str):
            return Continuation("", text)
        pairs = "chosen" in record and "rejected" in record
        raise DataError(f"its fields are {', '.join(record) or 'none'}", hint=_PAIRS if pairs else _FORMS)

    def _response(self, record: Record, response_key: str) -> Continuation | Conversation:
        prompt = read_field(record, self._prompt_key)
        calls = value_at(record, response_key)
        if holds_calls(calls) and tools_of(record):
            # Calls are published so, next to the tools that they call.
            calls = read_calls(calls, response_key)
            response: Text = [{"role": "assistant", "content": None, "tool_calls": calls}]
        else:
            response = read_field(record, response_key)
        if isinstance(prompt, str) and isinstance(response, str) and not self._section.as_chat:
            refuse_beside_texts(record, AS_CHAT)
            return Continuation(prompt, response)
        begun, (said,) = messages_of(prompt, {response_key: response}, self._prompt_key)
        messages = with_system([*begun, *said], record)
        return self._conversation(messages, len(messages) - len(said), record)

    def encode(self, record: Record) -> Example | LeftOut:
        found = self.read(record)
        if isinstance(found, Conversation):
            tokens = self._chat.encode(found.messages, found.turns, found.tools, found.arguments)
        else:
            tokens = continuation(self._chat.tokenizer, found.prompt, found.response)
        fitting = within_limit(tokens, self._section.max_tokens, self._section.on_long)
        sequence = fitting if isinstance(fitting, LeftOut) else sequence_of(fitting)
        if isinstance(sequence, LeftOut):
            return sequence
        # A text alone has no prompt that would be a message.
        prompt = found.prompt if isinstance(found, Continuation) else ""
        return Example((sequence,), misses_template=bool(prompt) and self._marks.are_missing(prompt))

    def _response_key(self, record: Record) -> str | None:
        if (key := self._section.response_key) is not None:
            return key
        return next((key for key in _RESPONSES if value_at(record, key) is not None), None)

    def _conversation(self, messages: Messages, first: int, record: Record) -> Conversation:
        if not any(message["role"] == "assistant" for message in messages[first:]):
            raise DataError("no message of the assistant is to be trained", hint=_FORMS)
        turns = trained_turns(messages, first)
        if self._section.train_on == "last":
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            turns = [turn for turn in turns if turn == last]
        messages, tools = shown_tools(tools_of(record), without_flags(messages))
        return Conversation(messages, turns, tools or None, read_template_arguments(record))


def _messages(record: Record, key: str) -> Messages:
    """The conversation of a row."""
    found = read_field(record, key)
    return with_system(read_messages(found, key) if isinstance(found, str) else found, record)


def within_limit(
    tokens: MaskedTokens, most: int, on_long: Literal["skip", "truncate", "refuse"]
) -> MaskedTokens | LeftOut:
    """Tokens that are not too many.

    Raises:
        DataError: there are too many, and such rows are refused.
    """
    if len(tokens.ids) <= most:
        return tokens
    if on_long == "refuse":
        raise DataError(
            f"it has {len(tokens.ids)} tokens, and data.max_tokens is {most}",
            hint="raise data.max_tokens, or set data.on_long to skip or truncate",
        )
    return MaskedTokens(tokens.ids[:most], tokens.trained[:most]) if on_long == "truncate" else LeftOut.LONG
