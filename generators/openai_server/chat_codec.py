"""The interface between the endpoint and a model's tokenizer, chat template and format of tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollmesh.generators.openai_server.conversations.messages import Message


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer of a model.

    Attributes:
        content: its text, without tool calls.
        calls: tool calls: name and arguments, the latter as JSON gave them.
    """

    content: str
    calls: tuple[tuple[str, Any], ...] = ()


class TooLongError(Exception):
    """A text has more tokens than are allowed; it was not tokenised to its end.

    Args:
        tokens: that it has at least.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens or more")
        self.tokens = tokens


class ChatCodec(Protocol):
    """Converts between messages, text and tokens; may be called in several threads at once."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any], max_tokens: int) -> list[int]:
        """The tokens of a conversation up to the model's turn.

        Args:
            messages: in normal form.
            tools: shown to the model.
            max_tokens: most tokens allowed.

        Raises:
            ApiError: 400: the chat template cannot take it.
            TooLongError: it has more tokens.
        """
        ...

    def continuation(
        self, answer: Sequence[int], new: Sequence[Message], tools: Sequence[Any], max_tokens: int, *, added: str = ""
    ) -> list[int] | None:
        """The tokens between the model's last token and its next turn.

        Args:
            answer: sampled tokens.
            new: messages that follow.
            tools: that the prompt of the conversation shows.
            max_tokens: most tokens allowed.
            added: text at the end of the model's turn that it did not sample; the turn has no end token then.

        Returns:
            token ids; None: the template cannot continue with such messages.

        Raises:
            TooLongError: it has more tokens.
        """
        ...

    def check_tools(self, tools: Sequence[Any]) -> None:
        """Refuses tools whose calls could not be read.

        Raises:
            ApiError: 400.
        """
        ...

    def call_grammar(
        self, prompt: Sequence[int], tools: Sequence[Any], *, many: bool, schema: Mapping[str, Any] | None = None
    ) -> str:
        """The grammar (`engines.token_grammar`) of an answer that calls tools, or is JSON, and says nothing else.

        Args:
            prompt: tokens before the answer.
            tools: one of them is called; none: the answer is JSON.
            many: several calls are allowed.
            schema: of an answer that calls no tool; None: a call is required.

        Raises:
            ApiError: 400: the model's form of calls, or a schema, has no grammar, or the prompt has opened thoughts
                before JSON.
        """
        ...

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a text completion's prompt, with the tokenizer's own special tokens.

        Raises:
            TooLongError: there are more than `max_tokens`.
        """
        ...

    def encode_more(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of text that follows other tokens.

        Raises:
            TooLongError: there are more than `max_tokens`.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text, special tokens left out."""
        ...

    def token(self, token_id: int) -> str:
        """A token as text, a special one by its name."""
        ...

    def answer(
        self, ids: Sequence[int], text: str, tools: Sequence[Any], *, prompt: Sequence[int] | None = None
    ) -> ParsedAnswer:
        """Parses an answer.

        Args:
            ids: all its tokens.
            text: of these, up to a stop string.
            tools: those offered; none: there are no calls in it.
            prompt: tokens before it, which may have opened thoughts; None: one that ends with a user's message.
        """
        ...
