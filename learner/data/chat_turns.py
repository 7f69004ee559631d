"""Conversations become token ids and a mask of what the model itself says, exact to the token.

A template that marks the model's words with `{% generation %}` says which characters they are. Other templates are
rendered twice. A turn is then what the conversation with it has beyond its prompt, generation prompt included. The text
is tokenized once, as a whole. Where a token would reach across the border of a turn, the parts are tokenized one by
one. So generators see them too, for they tokenize a prompt alone. Nothing is trained that a template adds after the
end token: no model ever samples it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTokens:
    """A text as tokens.

    Attributes:
        ids: int32 [T].
        trained: bool [T], the model's own tokens.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


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
        text, spans = self._render(messages, turns, tools)
        end_token = self.tokenizer.eos_token
        spans = [_without_what_follows(text, span, end_token) for span in spans]
        return tokenize_spans(self.tokenizer, text, spans, special_tokens=False)

    def _render(self, messages: Messages, turns: Sequence[int], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
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


def tokenize_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span], *, special_tokens: bool
) -> MaskedTokens:
    """Tokenizes a text; tokens within spans of its characters are trained.

    Args:
        tokenizer: of the model.
        text: all of it.
        spans: ascending, not overlapping.
        special_tokens: those that the tokenizer adds at the beginning; never at the end.
    """
    cuts = sorted({border for span in spans for border in span} - {0, len(text)})
    ids, places = _whole(tokenizer, text, special_tokens=special_tokens)
    if places is None or any(start < cut < end for start, end in places for cut in cuts):
        ids, places = [], []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece, _ = _whole(tokenizer, text[start:end], special_tokens=special_tokens and not start)
            ids += piece
            places += [(start, end)] * len(piece)
    inside = [any(first <= start and end <= last and start < end for first, last in spans) for start, end in places]
    return MaskedTokens(np.array(ids, dtype=np.int32), np.array(inside, dtype=bool))


def _whole(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool
) -> tuple[list[int], list[Span] | None]:
    """Token ids with their places in the text; no places where the tokenizer does not know them."""
    if not text:
        return [], []
    fast = bool(tokenizer.is_fast)
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=fast)
    ids: list[int] = list(encoded["input_ids"])
    places = [(int(start), int(end)) for start, end in encoded["offset_mapping"]] if fast else None
    while special_tokens and ids and ids[-1] == tokenizer.eos_token_id and (places is None or places[-1] == (0, 0)):
        ids.pop()
        if places is not None:
            places.pop()
    return ids, places


def _without_what_follows(text: str, span: Span, end_token: str | None) -> Span:
    """A turn without what stands after its end token."""
    start, end = span
    found = text.rfind(end_token, start, end) if end_token else -1
    return (start, found + len(end_token)) if found >= 0 and end_token else span
