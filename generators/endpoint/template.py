"""The endpoint's language, by the model's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from generators.agents.calls import typed_arguments
from generators.agents.chat import Chat, as_unicode
from generators.agents.parsers import choose_parser
from generators.endpoint.failures import ApiError
from generators.endpoint.language import Answer
from generators.endpoint.messages import Message
from generators.endpoint.record import tools_key
from mesh.config.rollout import ParserName
from mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Sets of tools for which renderings are kept.
_TOOL_SETS = 64


class TokenizerLanguage:
    """See `Language`.

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
        self._chats: OrderedDict[str, Chat] = OrderedDict()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        import jinja2

        if self._tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions", reason="no_chat_template")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        return self.encode_more(str(text))

    def goes_on(self, answer: Sequence[int], new: Sequence[Message], tools: Sequence[Any]) -> list[int] | None:
        if any(not isinstance(value, str) for message in new for value in message.values()):
            return None
        try:
            return self._chat(tools).after_turn(answer, new)
        except ConfigError:
            return None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(as_unicode(text))["input_ids"])

    def encode_more(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(as_unicode(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def answer(self, ids: Sequence[int], text: str, tools: Sequence[Any]) -> Answer:
        try:
            parse = choose_parser(self._parser, self._template_text())
        except ConfigError as error:
            raise ApiError(400, str(error), param="tools") from error
        parsed = parse(self._chat(tools).said(ids))
        if not parsed.good:
            # Calls that cannot be read stay in the text: the agent sees what the model wrote.
            return Answer(text)
        return Answer(
            parsed.content,
            tuple((call.name, typed_arguments(call, _parameters(tools, call.name))) for call in parsed.good),
        )

    def check_tools(self, tools: Sequence[Any]) -> None:
        try:
            choose_parser(self._parser, self._template_text())
            self._chat(tools)
        except ConfigError as error:
            raise ApiError(400, str(error), param="tools") from error

    def _template_text(self) -> str:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)

    def _chat(self, tools: Sequence[Any]) -> Chat:
        key = tools_key(tools)
        chat = self._chats.get(key)
        if chat is None:
            chat = Chat(
                self._tokenizer, end_ids=self._end_ids, tools=list(tools), template_kwargs=self._template_kwargs
            )
            self._chats[key] = chat
            if len(self._chats) > _TOOL_SETS:
                self._chats.popitem(last=False)
        self._chats.move_to_end(key)
        return chat


def _parameters(tools: Sequence[Any], name: str) -> Any:
    """The schema of a tool's arguments; None where there is no such tool, or it says nothing."""
    functions = [tool["function"] for tool in tools]
    return next((function.get("parameters") for function in functions if function["name"] == name), None)
