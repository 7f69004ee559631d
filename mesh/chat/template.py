"""The one place that renders a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import xxhash

from rollmesh.mesh.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters of a text: the first one, and the one after the last."""
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template with the tokenizer whose special tokens it writes.

    Attributes:
        tokenizer: of the model.
        source: the template, in Jinja.
        kwargs: further arguments of it.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None, *, tools: bool = False
    ) -> Self:
        """The template of a tokenizer.

        Args:
            tokenizer: of the model.
            kwargs: further arguments of the template.
            tools: take the template for tools, if the tokenizer has one for each use.

        Raises:
            ChatTemplateError: it has none.
        """
        try:
            # The template for tools is taken if there are any.
            source = tokenizer.get_chat_template(tools=[{}] if tools else None)
        except ValueError as error:
            raise ChatTemplateError(
                "the tokenizer has no chat template",
                hint="use the folder of an instruction-tuned model, or plain texts",
            ) from error
        return cls(tokenizer, source, dict(kwargs or {}))

    @property
    def marks_turns(self) -> bool:
        """Whether it marks the words of the assistant with `{% generation %}`."""
        return _MARKS_TURNS.search(self.source) is not None

    @property
    def digest(self) -> bytes:
        """A digest of all that decides a rendering but the messages."""
        tokens = sorted(map(str, self.tokenizer.added_tokens_decoder.values()))
        of_tokenizer = sorted(self.tokenizer.special_tokens_map.items())
        return xxhash.xxh3_128_digest(repr((self.source, sorted(self.kwargs.items()), of_tokenizer, tokens)).encode())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """A conversation as text.

        Args:
            messages: in the forms that the template takes, see `fit`.
            tools: schemas that are shown.
            generation_prompt: whether the beginning of the next turn follows.
            kwargs: further arguments of the template, which go before its own ones.

        Raises:
            ChatTemplateError: the template refuses them, or fails.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **{**self.kwargs, **kwargs},
                )
            )
        except template_errors() as error:
            raise _refused(messages, error) from error

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """A conversation as text, and the places that `{% generation %}` marks in it.

        Raises:
            ChatTemplateError: see `render`.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # Its annotation names one text, and it gives lists of texts and of their spans.
            texts, spans = cast(
                tuple[list[str], list[list[Span]]],
                render_jinja_template(
                    conversations=[[dict(message) for message in messages]],
                    tools=list(tools) if tools else None,
                    chat_template=self.source,
                    return_assistant_tokens_mask=True,
                    **{**self.tokenizer.special_tokens_map, **self.kwargs},
                ),
            )
        except template_errors() as error:
            raise _refused(messages, error) from error
        return texts[0], list(spans[0])


def template_errors() -> tuple[type[Exception], ...]:
    """The errors of rendering: those of the template language, and of computations in it."""
    import jinja2

    computed = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
    return (jinja2.TemplateError, *computed)


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens as text, the longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*map(str, tokenizer.all_special_tokens), *added}, key=lambda text: (-len(text), text))


def _refused(messages: Sequence[Message], error: Exception) -> ChatTemplateError:
    roles = " ".join(str(message.get("role")) for message in messages)
    return ChatTemplateError(
        f"the chat template refuses a conversation of {roles}: {error}",
        hint="`rollmesh data check --template` shows what it takes; data.chat_template_kwargs has further arguments",
    )
