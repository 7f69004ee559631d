"""The `ChatCodec` of the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from rollmesh.generators.agents.chat_template import ChatRenderer, as_unicode, longest_token
from rollmesh.generators.agents.tool_calls import typed_arguments
from rollmesh.generators.engines.token_grammar import stands_by_id
from rollmesh.generators.openai_server.call_grammar import (
    answer_fault,
    call_grammar,
    find_form,
    json_grammar,
    tools_fault,
)
from rollmesh.generators.openai_server.chat_codec import ParsedAnswer, TooLongError
from rollmesh.generators.openai_server.conversations.messages import Message
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.fitting import fit
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS, thoughts_at_end
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import ChatTemplateError, ConfigError
from rollmesh.mesh.masked_text import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens at the end of a prompt in which thoughts may be opened.
_OPENING = 8
# Sets of tools for which renderings are kept.
_TOOL_SETS = 16
# Characters of a text that may be too long which are tokenised first, for each token that is allowed.
_TOKEN_CHARACTERS = 4
# Tokens that a cut text may have more than the same characters of the whole.
_CUT_TOKENS = 64


class TemplateChatCodec:
    """See `ChatCodec`.

    Args:
        tokenizer: of the model.
        end_ids: tokens that end a turn.
        parser: `rollout.agent.parser`.
        template_kwargs: `data.chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: frozenset[int],
        parser: ParserName = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._parser = parser
        self._template_kwargs = dict(template_kwargs or {})
        self._template = cache(self._ask)
        self._chat_with = lru_cache(_TOOL_SETS)(self._make_chat)
        self._longest = longest_token(tokenizer)
        # The first use sets what later ones, in several threads, leave as it is.
        tokenizer.encode("")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any], max_tokens: int) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions", reason="no_chat_template")
        try:
            template, facts = self._template(bool(tools))
            text = template.render(fit(messages, facts), tools=tools, generation_prompt=True)
        except ChatTemplateError as error:
            raise ApiError(400, error.message, param="messages") from error
        return self.encode_more(text, max_tokens)

    def continuation(
        self, answer: Sequence[int], new: Sequence[Message], tools: Sequence[Any], max_tokens: int, *, added: str = ""
    ) -> list[int] | None:
        if any(not isinstance(value, str) for message in new for value in message.values()):
            return None
        try:
            chat = self._chat(tools)
            text = chat.text_after_turn(new)
        except ConfigError:
            return None
        return chat.after_end(answer, self.encode_more(added + text, max_tokens))

    def encode(self, text: str, max_tokens: int) -> list[int]:
        return self._encoded(text, max_tokens, lambda part: encode_text(self._tokenizer, part))

    def encode_more(self, text: str, max_tokens: int) -> list[int]:
        return self._encoded(
            text, max_tokens, lambda part: list(self._tokenizer.encode(part, add_special_tokens=False))
        )

    def _encoded(self, text: str, max_tokens: int, encode: Callable[[str], list[int]]) -> list[int]:
        """A text's tokens; one that is far too long is not tokenised to its end."""
        text = as_unicode(text)
        first = _TOKEN_CHARACTERS * max_tokens
        if len(text) > first:
            if len(text) > self._longest * max_tokens:
                raise TooLongError(len(text) // self._longest)
            begun = len(encode(text[:first])) - _CUT_TOKENS
            if begun > max_tokens:
                raise TooLongError(begun)
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def answer(
        self, ids: Sequence[int], text: str, tools: Sequence[Any], *, prompt: Sequence[int] | None = None
    ) -> ParsedAnswer:
        try:
            parse = self._chat(tools).parser(self._parser)
        except ConfigError as error:
            raise ApiError(400, str(error), param="tools") from error
        chat = self._chat(tools)
        # Some templates open thoughts after a user's message, and none after the result of a tool.
        opened = chat.opens_thoughts if prompt is None else bool(self._opened(prompt))
        read = partial(parse, opened=opened, names={tool["function"]["name"] for tool in tools})
        turn = chat.decode_turn(ids)
        parsed = read(turn)
        if not parsed.valid:
            # Calls that cannot be read stay in the text: the agent sees what the model wrote.
            return ParsedAnswer(text)
        cut = self._before_stop(chat, ids, text)
        return ParsedAnswer(
            parsed.content if cut == turn else read(cut).content,
            tuple((call.name, typed_arguments(call, _parameters(tools, call.name))) for call in parsed.valid),
        )

    def _before_stop(self, chat: ChatRenderer, ids: Sequence[int], text: str) -> str:
        """A turn's text with special tokens, as far as `text` goes without them."""
        if len(self.decode(ids)) == len(text):
            return chat.decode_turn(ids)
        whole = bisect_right(range(len(ids) + 1), len(text), key=lambda count: len(self.decode(ids[:count]))) - 1
        return chat.decode_turn(ids[:whole]) + text[len(self.decode(ids[:whole])) :]

    def check_tools(self, tools: Sequence[Any]) -> None:
        try:
            self._chat(tools).parser(self._parser)
        except ConfigError as error:
            raise ApiError(400, str(error), param="tools") from error

    def call_grammar(
        self, prompt: Sequence[int], tools: Sequence[Any], *, many: bool, schema: Mapping[str, Any] | None = None
    ) -> str:
        template = self._template_text()
        opening = self._opened(prompt)
        if schema is not None:
            if opening:
                raise ApiError(
                    400,
                    f"response_format: the chat template opens thoughts in the prompt ({opening}), and an answer with "
                    "thoughts is no JSON; have it close them, often with data.chat_template_kwargs: "
                    "{enable_thinking: false}",
                    reason="unsupported_value",
                    param="response_format",
                )
            if not tools:
                return _checked(json_grammar(schema), answer_fault(schema), "response_format", "the schema has")
        parse = self._chat(tools).parser(self._parser)
        form = find_form(parse, template)
        if form is None:
            unable = "tool_choice can only be `auto` or `none` with this model"
            if schema is not None:
                unable = "with response_format, tool_choice can only be `none` with this model"
            raise ApiError(
                400,
                f"{unable}: there is no grammar for the form of calls that its parser reads (rollout.agent.parser)",
                param="tool_choice",
            )
        known = [marks for marks in THOUGHT_MARKS if marks[0] == opening or (not opening and marks[1] in template)]
        grammar = call_grammar(
            form,
            tools,
            self._special_id,
            many=many,
            thoughts=known[0] if known else None,
            opened=bool(opening),
            schema=schema,
        )
        fault = tools_fault(tools) or answer_fault(schema or {})
        return _checked(grammar, fault, "tools", "the schemas of the tools have")

    def _opened(self, prompt: Sequence[int]) -> str:
        """The mark with which a prompt opens thoughts; empty: none."""
        tail = self._tokenizer.decode(list(prompt[-_OPENING:]), skip_special_tokens=False)
        return thoughts_at_end(str(tail))

    def _special_id(self, text: str) -> int | None:
        number = self._tokenizer.get_vocab().get(text)
        token = None if number is None else self._tokenizer.added_tokens_decoder.get(number)
        return number if token is not None and stands_by_id(token) else None

    def _ask(self, tools: bool) -> tuple[ChatTemplate, TemplateFacts]:
        template = ChatTemplate.of(self._tokenizer, self._template_kwargs, tools=tools)
        return template, facts_of(template)

    def _template_text(self) -> str:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)

    def _chat(self, tools: Sequence[Any]) -> ChatRenderer:
        return self._chat_with(json.dumps(tools))

    def _make_chat(self, tools: str) -> ChatRenderer:
        return ChatRenderer(
            self._tokenizer, end_ids=self._end_ids, tools=json.loads(tools), template_kwargs=self._template_kwargs
        )


def _checked(grammar: str, fault: str, param: str, having: str) -> str:
    """A grammar that can be read.

    Raises:
        ApiError: 400: it cannot.
    """
    from llguidance import LLMatcher

    if error := fault or LLMatcher.validate_grammar(grammar):
        field = "tool_choice" if param == "tools" else param
        raise ApiError(400, f"{field}: {having} no grammar: {error.partition(chr(10))[0]}", param=param)
    return grammar


def _parameters(tools: Sequence[Any], name: str) -> Any:
    """The schema of a tool's arguments; None where there is no such tool, or it says nothing."""
    functions = [tool["function"] for tool in tools]
    return next((function.get("parameters") for function in functions if function["name"] == name), None)
