"""The tokens between two turns of a conversation.

Invariants:

- Sampled tokens are never tokenised again.
- The chat template renders the tokens between two turns after a fixed conversation, in which a mark stands for the
  model's turn. They are cut off after the mark, so that they are the same in any conversation.
- One end token ends a turn: the sampled one, or, where the turn was cut, the template's.
- A text from outside cannot end a turn: special tokens in it are broken up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from rollmesh.generators.agents.tool_call_parsers import Parser, choose_parser
from rollmesh.mesh.agent_tools import Schema
from rollmesh.mesh.chat.fitting import fit
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate, Message, special_texts
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import ChatTemplateError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "rollmeshturn"
_CUT = " ... [cut]"
# Tokens that a template may put between a turn's text and its end token, and after it before the next message.
_BEFORE_END = 2
_CACHED = 1024
# Characters of messages up to which renderings are kept: long ones hardly come again.
_CACHED_CHARACTERS = 4096
# Characters of a text from outside that are tokenised at first, for each token that may be kept.
_TOKEN_CHARACTERS = 8


class ChatRenderer:
    """Renders conversations for one model.

    Args:
        tokenizer: with a chat template.
        end_ids: tokens that end a turn.
        tools: schemas, as they are shown in prompts.
        template_kwargs: extra arguments of the template.
        observation_tokens: of one observation; longer ones are cut.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that does not continue a conversation after a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        tools: Sequence[Schema] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        observation_tokens: int = 512,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._tools = list(tools) or None
        try:
            self._template = ChatTemplate.of(tokenizer, template_kwargs, tools=bool(tools))
            self._facts = facts_of(self._template)
        except ChatTemplateError as error:
            raise ConfigError(f"agents need a chat template: {error.message}", hint=error.hint) from error
        self._limit = observation_tokens
        # A single character is no mark.
        self._special = [text for text in special_texts(tokenizer) if len(text) > 1]
        self._cached_rest = lru_cache(_CACHED)(self._render_rest)
        role = "tool" if tools else "user"
        if not self.after_turn([], [{"role": role, "content": "1", "name": "f", "tool_call_id": "000000000"}]):
            raise ConfigError("the chat template puts nothing between two turns", hint="use another chat template")

    @cached_property
    def _longest_token(self) -> int:
        return longest_token(self._tokenizer)

    def parser(self, name: ParserName) -> Parser:
        """The parser of the model's calls; see `choose_parser`."""
        return choose_parser(name, self._template.source, self._facts)

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows the model its tools, or the configuration has no tools."""
        return self._tools is None or self._facts.tools

    @property
    def opens_thoughts(self) -> bool:
        """Whether turns begin within thoughts, which their prompt has opened."""
        return bool(self._facts.opened_thoughts)

    def render_opening(self, observation: str) -> list[int]:
        """Tokens after a prompt that ends within its last user message: an observation, and up to the first turn."""
        text = self._apply([{"role": "user", "content": _MARK}])
        return self._encode(observation + text.rpartition(_MARK)[2])

    def after_turn(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Tokens after a turn: its end where none was sampled, the messages, and up to the next turn.

        Args:
            turn: sampled tokens.
            messages: the answer; roles, contents, and for tools `name` and `tool_call_id`.
        """
        return self.after_end(turn, self._encode(self.text_after_turn(messages)))

    def text_after_turn(self, messages: Sequence[Message]) -> str:
        """Text after a turn of which no end was sampled.

        Args:
            messages: see `after_turn`.
        """
        frozen = tuple(tuple(sorted(message.items())) for message in messages)
        short = sum(len(value) for message in messages for value in message.values()) <= _CACHED_CHARACTERS
        return self._cached_rest(frozen) if short else self._render_rest(frozen)

    def after_end(self, turn: Sequence[int], ids: Sequence[int]) -> list[int]:
        """The tokens of `text_after_turn` without the end that the turn has sampled itself."""
        return list(ids[self._ended_by(turn, ids) :])

    def recover_contents(self, turn: Sequence[int], between: Sequence[int], messages: Sequence[Message]) -> list[str]:
        """The contents of messages that were rendered after a turn: `after_turn` backwards, as far as text allows."""
        marked = [{**message, "content": f"{_MARK}{index}{_MARK}"} for index, message in enumerate(messages)]
        rest = self.text_after_turn(marked)
        ids = self._encode(rest)
        text = self._decode(ids[: self._ended_by(turn, ids)]) + self._decode(between)
        pieces = re.split(rf"{_MARK}\d+{_MARK}", rest)
        match = re.fullmatch("(.*?)".join(map(re.escape, pieces)), text, re.DOTALL)
        return list(match.groups()) if match else [text] * len(messages)

    def decode_turn(self, turn: Sequence[int]) -> str:
        """The text of a turn, special tokens included, without the token that ended it."""
        return self._decode(turn[:-1] if self.has_end(turn) else turn)

    def plain_text(self, turn: Sequence[int]) -> str:
        """The text of a turn without special tokens."""
        return str(self._tokenizer.decode(list(turn), skip_special_tokens=True))

    def has_end(self, turn: Sequence[int]) -> bool:
        """True where an end token was sampled."""
        return bool(turn) and turn[-1] in self._end_ids

    def render_observation(self, text: str) -> str:
        """A text from outside as the model may see it: special tokens broken up, cut to the limit."""
        # A huge text is not tokenised whole to keep a little of it: text beyond this has no room anyway.
        text = text[: (self._limit + 1) * self._longest_token]
        shown = self._limit * _TOKEN_CHARACTERS
        while True:
            part = self.escape_special_tokens(text[:shown])
            ids = self._encode(part)
            if len(ids) > self._limit:
                room = max(0, self._limit - len(self._encode(_CUT)))
                return self._decode(ids[:room]).rstrip("\ufffd") + _CUT
            if shown >= len(text):
                return part
            shown *= 2

    def escape_special_tokens(self, text: str) -> str:
        """A text from outside of which no token is special; halves of surrogate pairs, no Unicode, are `?`."""
        text = as_unicode(text)
        for special in self._special:
            text = text.replace(special, special[0] + " " + special[1:])
        return text

    def _ended_by(self, turn: Sequence[int], ids: Sequence[int]) -> int:
        """Tokens of a rest that the turn has sampled itself."""
        if self.has_end(turn):
            for index, token in enumerate(ids[: _BEFORE_END + 1]):
                if token in self._end_ids:
                    return index + 1
        return 0

    def _render_rest(self, frozen: tuple[tuple[tuple[str, Any], ...], ...]) -> str:
        messages = [dict(items) for items in frozen]
        question: Message = {"role": "user", "content": "?"}
        text = self._apply_or_none([question, {"role": "assistant", "content": _MARK}, *messages])
        if text is not None and _MARK in text:
            return text.partition(_MARK)[2]
        if not self._facts.arguments:
            raise ConfigError(
                "the chat template writes neither calls nor answers of tools, which an agent with tools needs",
                hint="use a model whose template does: `rollmesh data check --template MODEL` tells; or write the "
                "conversation yourself, as an environment or a program (docs/agents.md)",
            )
        # Some templates take answers of tools only after a call.
        call = {"name": "f", "arguments": {}}
        tool_call: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "000000000", "type": "function", "function": call}],
        }
        before = self._apply([question, tool_call], generation_prompt=False)
        whole = self._apply([question, tool_call, *messages])
        if not whole.startswith(before):
            raise ConfigError(
                "the chat template renders a turn otherwise once it is answered", hint="use another chat template"
            )
        ids = self._encode(before)
        last = max((index for index, token in enumerate(ids) if token in self._end_ids), default=len(ids))
        end = self._decode(ids[last:]) if len(ids) - last <= _BEFORE_END + 1 else ""
        return end + whole[len(before) :]

    def _apply_or_none(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._apply(messages)
        except ConfigError:
            return None

    def _apply(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        try:
            fitted = fit(messages, self._facts)
            return self._template.render(fitted, tools=self._tools, generation_prompt=generation_prompt)
        except ChatTemplateError as error:
            raise ConfigError(error.message, hint=error.hint) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(as_unicode(text), add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def as_unicode(text: str) -> str:
    """A text that tokenizers take: halves of surrogate pairs, which JSON can bring, become `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters that one token stands for at most."""
    return max(map(len, tokenizer.get_vocab()), default=1)
