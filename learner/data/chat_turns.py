"""Conversations become token ids and a mask of what the model itself says, exact to the token.

A template that marks the model's words with `{% generation %}` says which characters they are. Other templates are
rendered twice. A turn is then what the conversation with it has beyond its prompt, generation prompt included. Nothing
is trained that a template adds after the token that ends a turn: no model ever samples it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.masked_text import MaskedTokens, Span, tokenize_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Encodes conversations with a tokenizer and its template.

    Attributes:
        tokenizer: of the model.
        template_kwargs: further arguments of the template.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, messages: Messages, turns: Sequence[int], tools: Sequence[Any] | None = None) -> MaskedTokens:
        """A conversation, with some of its turns to train.

        Args:
            messages: all of them, with `role` and `content`.
            turns: indices of the assistant's messages to train, ascending.
            tools: schemas of tools that the template shows.

        Raises:
            DataError: there is no template, it fails, or it changes earlier messages when later ones come.
        """
        text, spans = self.render(messages, turns, tools)
        return tokenize_spans(self.tokenizer, text, spans, special_tokens=False)

    def render(
        self, messages: Messages, turns: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """A conversation as text, with the characters of some turns, each up to the token that ends it.

        Args, Raises: see `encode`.
        """
        text, spans = self._spans(messages, turns, tools)
        return text, [_without_what_follows(self.tokenizer, text, span) for span in spans]

    def _spans(self, messages: Messages, turns: Sequence[int], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        template = self._template(tools)
        own = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if _MARKS_TURNS.search(template):
            text, marked = self._render_marked(template, messages, tools)
            # Templates may mark only the last turns, or none that are empty.
            places = {turn: len(marked) - len(own) + place for place, turn in enumerate(own)}
            return text, [marked[places[turn]] for turn in turns if places[turn] >= 0]
        text = self._apply(template, messages, tools, generation_prompt=False)
        return text, [self._difference(template, messages, turn, tools, text) for turn in turns]

    def _difference(self, template: str, messages: Messages, turn: int, tools: Sequence[Any] | None, text: str) -> Span:
        """The characters of a turn, as what the whole text has beyond its prompt."""
        before = self._apply(template, messages[:turn], tools, generation_prompt=True) if turn else ""
        after = text
        if turn + 1 < len(messages):
            after = self._apply(template, messages[: turn + 1], tools, generation_prompt=False)
        if not text.startswith(before) or not text.startswith(after):
            raise DataError(
                f"the chat template writes message {turn} otherwise once later messages follow",
                hint="set data.train_on: last, or mark the assistant's words in the template with {% generation %}",
            )
        return len(before), len(after)

    def _template(self, tools: Sequence[Any] | None) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=tools)  # type: ignore[arg-type]  # the stub's own alias
        except ValueError as error:
            raise DataError(
                "a row holds chat messages, and the tokenizer has no chat template",
                hint="use the folder of an instruction-tuned model, or rows of plain texts",
            ) from error

    def _apply(self, template: str, messages: Messages, tools: Sequence[Any] | None, *, generation_prompt: bool) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.template_kwargs,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template failed: {error}", hint="see data.chat_template_kwargs") from error

    def _render_marked(
        self, template: str, messages: Messages, tools: Sequence[Any] | None
    ) -> tuple[str, Sequence[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            # Its annotation names one text, and it gives lists of texts and of their spans.
            texts, spans = cast(
                tuple[list[str], list[list[Span]]],
                render_jinja_template(
                    conversations=[given],
                    tools=list(tools) if tools else None,
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
                ),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template failed: {error}", hint="see data.chat_template_kwargs") from error
        return texts[0], spans[0]


def _without_what_follows(tokenizer: PreTrainedTokenizerBase, text: str, span: Span) -> Span:
    """A turn without what stands after the token that ends it.

    That is the tokenizer's end token. A template that never writes it may end turns with another special token.
    """
    start, end = span
    end_token = tokenizer.eos_token
    if isinstance(end_token, str) and (found := text.rfind(end_token, start, end)) >= 0:
        return start, found + len(end_token)
    kept = text[start:end].rstrip()
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return (start, start + len(kept)) if any(map(kept.endswith, special)) else span
