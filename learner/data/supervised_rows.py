"""Rows of supervised fine-tuning: conversations, prompts with responses, or texts.

Forms (TRL's, and verl's for SFT): `messages`, with `tools` if there are any; a prompt and a response, each a text or
messages; `text`. Responses and texts end with the tokenizer's end token, conversations as the chat template ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollmesh.learner.data.chat_turns import ChatEncoder, Messages
from rollmesh.learner.data.examples import Example, ExampleForm, sequence_of
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_fields import as_messages, text_or_messages, value_at
from rollmesh.mesh.config.trainers.sections import SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.masked_text import MaskedTokens, continuation

_RESPONSES = ("completion", "response")
_FORMS = "rows need `messages`, a prompt with `completion` or `response`, or `text`: see docs/trainers.md"


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
    """

    messages: Messages
    turns: Sequence[int]
    tools: Sequence[Any] | None = None


class SupervisedForm(ExampleForm):
    """The form of a source's conversations, responses or texts.

    Args:
        chat: encodes conversations.
        section: forms of the rows, and their longest.
        prompt_key: field of the prompt.
    """

    def __init__(self, chat: ChatEncoder, section: SupervisedRowsSection, prompt_key: str) -> None:
        self._chat = chat
        self._section = section
        self._prompt_key = prompt_key

    def read(self, record: Record) -> Continuation | Conversation:
        if record.get("messages") is not None:
            messages = as_messages(text_or_messages(record, "messages"), "user")
            return self._conversation(messages, 0, record)
        if (response_key := self._response_key(record)) is not None:
            prompt = text_or_messages(record, self._prompt_key)
            response = text_or_messages(record, response_key)
            if isinstance(prompt, str) and isinstance(response, str) and not self._section.as_chat:
                return Continuation(prompt, response)
            before = as_messages(prompt, "user")
            return self._conversation([*before, *as_messages(response, "assistant")], len(before), record)
        if isinstance(text := record.get("text"), str):
            return Continuation("", text)
        raise DataError(f"its fields are {', '.join(record) or 'none'}", hint=_FORMS)

    def encode(self, record: Record) -> Example | None:
        found = self.read(record)
        if isinstance(found, Conversation):
            tokens = self._chat.encode(found.messages, found.turns, found.tools)
        else:
            tokens = continuation(self._chat.tokenizer, found.prompt, found.response)
        fitting = fit(tokens, self._section.max_tokens, self._section.on_long)
        sequence = None if fitting is None else sequence_of(fitting)
        return None if sequence is None else Example((sequence,))

    def _response_key(self, record: Record) -> str | None:
        if (key := self._section.response_key) is not None:
            return key
        return next((key for key in _RESPONSES if value_at(record, key) is not None), None)

    def _conversation(self, messages: Messages, first: int, record: Record) -> Conversation:
        turns = [index for index, message in enumerate(messages) if index >= first and message["role"] == "assistant"]
        if not turns:
            raise DataError("no message of the assistant is to be trained", hint=_FORMS)
        chosen = turns[-1:] if self._section.train_on == "last" else turns
        return Conversation(messages, chosen, record.get("tools"))


def fit(tokens: MaskedTokens, most: int, on_long: Literal["skip", "truncate", "refuse"]) -> MaskedTokens | None:
    """Tokens that are not too many; None for a sequence that is left out.

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
    return MaskedTokens(tokens.ids[:most], tokens.trained[:most]) if on_long == "truncate" else None
