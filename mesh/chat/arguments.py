"""Arguments of a chat template beyond the conversation: of the run, of a source, and of single rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.chat.asking import AskedTemplate
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Sets of arguments that are asked about. Beyond them, texts such as dates are no part of the question.
_MOST_ASKED = 64
_OURS = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
    "processor_kwargs",
)


class TemplatesByArguments:
    """The template of a tokenizer with the arguments of each row; each set of switches is asked about once.

    Args:
        tokenizer: of the model.
        kwargs: arguments of all rows.
        source: a template in place of the tokenizer's; empty: that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], *, source: str = "") -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._source = source
        self._asked: dict[tuple[bool, str], AskedTemplate] = {}

    def of_row(self, own: Mapping[str, Any], *, tools: bool) -> AskedTemplate:
        """The template for a row.

        Args:
            own: arguments of the row, which go before those of all rows.
            tools: it has some.

        Raises:
            ChatTemplateError: there is no template, it writes no conversation, or it does not read an argument.
        """
        if ours := next((name for name in own if name in _OURS), None):
            raise ChatTemplateError(
                f"chat_template_kwargs has {ours}, which is no argument of a row's template",
                hint=f"remove {ours}; tools and messages have fields of their own",
            )
        kwargs = {**self._kwargs, **own}
        switches = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float | str)}
        asked = self._ask(switches, tools)
        _refuse_unread(own, asked.template.source)
        # Documents and the like are what a prompt says, not how it is written.
        return asked if switches == kwargs else replace(asked, template=replace(asked.template, kwargs=kwargs))

    def _ask(self, switches: dict[str, Any], tools: bool) -> AskedTemplate:
        key = tools, repr(sorted(switches.items()))
        if key in self._asked:
            return self._asked[key]
        if self._source:
            template = ChatTemplate(self._tokenizer, self._source, switches)
        else:
            template = ChatTemplate.of(self._tokenizer, switches, tools=tools)
        if len(self._asked) < _MOST_ASKED:
            asked = self._asked[key] = AskedTemplate(template, facts_of(template))
            return asked
        known = {name: value for name, value in switches.items() if isinstance(value, bool)}
        if known != switches and (tools, repr(sorted(known.items()))) in self._asked:
            return replace(self._ask(known, tools), template=template)
        return AskedTemplate(template, facts_of(replace(template, kwargs=known)))


def _refuse_unread(own: Mapping[str, Any], source: str) -> None:
    """Refuses arguments that would do nothing; one that is false asks for nothing."""
    for name, value in own.items():
        if value and not re.search(rf"\b{re.escape(name)}\b", source):
            raise ChatTemplateError(
                f"chat_template_kwargs has {name}, and the chat template does not read it",
                hint=f"remove {name} from the row, or use a model whose template reads it",
            )
