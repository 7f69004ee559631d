"""Conversations become token ids and a mask of what the model itself says, exact to the token.

A template that marks the model's words with `{% generation %}` says which characters they are. Other templates are
rendered twice. A turn is then what the conversation with it has beyond its prompt, generation prompt included. If
there are many, the first and the last are found so. If the marks around these tell the same, they tell the others.

A turn is trained with the token that ends it, also if the mark leaves it out or the template writes none. Nothing is
trained that a template adds after that token: no model ever samples it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.chat.arguments import TemplatesByArguments
from rollmesh.mesh.chat.asking import AskedTemplate
from rollmesh.mesh.chat.counting import counted_turns
from rollmesh.mesh.chat.template import Span, special_texts
from rollmesh.mesh.chat.thoughts import thoughts_end, thoughts_of, thoughts_within
from rollmesh.mesh.chat.words import check_words, words_of
from rollmesh.mesh.errors import ChatTemplateError
from rollmesh.mesh.masked_text import MaskedTokens, tokenize_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
# Characters of words in an error.
_SHOWN = 60
# Turns that are rendered in any case.
_RENDERED = 2


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Encodes conversations with a tokenizer and its template.

    Attributes:
        tokenizer: of the model.
        template_kwargs: further arguments of the template.
        places: rows of the model's embedding; None: not known.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    places: int | None = None
    _templates: TemplatesByArguments = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_templates", TemplatesByArguments(self.tokenizer, self.template_kwargs))

    def encode(
        self,
        messages: Messages,
        turns: Sequence[int],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> MaskedTokens:
        """A conversation, with some of its turns to train.

        Args:
            messages: all of them, with `role` and `content`.
            turns: indices of the assistant's messages to train, ascending.
            tools: schemas of tools that the template shows.
            arguments: of the template, for this conversation.

        Raises:
            ChatTemplateError: there is no template, it cannot write these messages, or it changes earlier ones when
                later ones come.
        """
        text, spans = self.render(messages, turns, tools, arguments)
        return tokenize_spans(self.tokenizer, text, spans, special_tokens=False)

    def render(
        self,
        messages: Messages,
        turns: Sequence[int],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """A conversation as text, with the characters of some turns, each up to the end of the token that ends it.

        Args, Raises: see `encode`.
        """
        return _Turns(self._templates.of_row(arguments or {}, tools=bool(tools)), messages, tools).render(turns)


class _Turns:
    """The turns of one conversation."""

    def __init__(self, asked: AskedTemplate, messages: Messages, tools: Sequence[Any] | None) -> None:
        self._template, self._facts, self._tools = asked.template, asked.facts, tools
        self._messages = asked.fit(
            [{name: value for name, value in message.items() if value is not None} for message in messages], tools
        )

    def render(self, turns: Sequence[int]) -> tuple[str, list[Span]]:
        """See `ChatEncoder.render`."""
        text, marked = self._whole()
        check_words(self._messages, text)
        counted = counted_turns(text, self._messages, self._facts) if len(turns) > _RENDERED else {}
        if counted:
            # With all that comes after the first turn, and before the last one.
            ends = [turns[0], turns[-1]]
            found = self._rendered(text, marked, ends, {})[1]
            if len(found) != len(ends) or any(
                counted.get(turn, span) != span for turn, span in zip(ends, found, strict=True)
            ):
                counted = {}
        return self._rendered(text, marked, turns, counted)

    def _rendered(
        self, text: str, marked: Mapping[int, Span], turns: Sequence[int], counted: Mapping[int, Span]
    ) -> tuple[str, list[Span]]:
        """Turns as renderings of the conversation up to each of them tell, but for those that are counted."""
        spans: list[Span] = []
        for turn in turns:
            if self._facts.marks and turn not in marked and self._says(turn):
                raise ChatTemplateError(
                    f"the chat template does not mark message {turn} with {{% generation %}}",
                    hint="take the marks out of the template, and its turns are found without them, or mark every turn",
                )
            if turn in marked or not self._facts.marks:
                if turn in counted:
                    start, end = counted[turn]
                    spans.append((max(start, marked[turn][0]), marked[turn][1]) if turn in marked else (start, end))
                    continue
                before = self._prompt(turn) if turn else self._before_first(text)
                if not text.startswith(before):
                    # As nothing follows, the turn can stand after its true prompt.
                    return self._composed(turn, before, spans)
                start, end = marked.get(turn) or (len(before), self._end(turn, text))
                spans.append((max(start, len(before)), end))
        for turn, (start, end) in zip(turns, spans, strict=False):
            self._check_said(turn, text[start:end])
        return self._with_ends(text, spans, turns)

    def _check_said(self, turn: int, said: str) -> None:
        """Refuses a turn of which the template leaves thoughts out; of the rest it is known that all is written."""
        message = self._messages[turn]
        thoughts = [thoughts_of(message), *thoughts_within(message.get("content"))]
        if any(thought.strip() not in said for thought in thoughts):
            last = "set data.train_on: last, " if turn + 1 < len(self._messages) and self._facts.drops_thoughts else ""
            raise ChatTemplateError(
                f"message {turn} has thoughts, and the chat template does not write them",
                hint=f"{last}remove them, or use a template that writes them: `rollmesh data check --template` tells "
                "the field from which it does",
            )

    def _whole(self) -> tuple[str, dict[int, Span]]:
        """The conversation, and the characters of the turns that the template marks."""
        if not self._facts.marks:
            return self._template.render(self._messages, tools=self._tools), {}
        text, marked = self._template.render_marked(self._messages, tools=self._tools)
        own = [index for index, message in enumerate(self._messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        for start, end in marked:
            # A turn may be marked in several parts, such as its words and its end.
            if spans and not text[spans[-1][1] : start].strip():
                start = spans.pop()[0]
            spans.append((start, end))
        found: dict[int, Span] = {}
        for start, end in reversed(spans):
            # A turn without words may have no mark.
            while own and not all(words in text[start:end] for words in self._says(own[-1])):
                own.pop()
            if not own:
                raise ChatTemplateError(
                    f"the chat template marks other words than the assistant's with {{% generation %}}: "
                    f"{text[start:end][:_SHOWN]!r}",
                    hint="mark all words of a turn at once, or take the marks out of the template",
                )
            found[own.pop()] = (start, end)
        return text, found

    def _says(self, turn: int) -> list[str]:
        """The words of a turn, and the names of the tools that it calls."""
        message = self._messages[turn]
        calls = (call.get("function", call) for call in message.get("tool_calls") or [])
        return [*words_of(message), *(str(call.get("name", "")) for call in calls)]

    def _prompt(self, turn: int) -> str:
        return self._template.render(self._messages[:turn], tools=self._tools, generation_prompt=True)

    def _before_first(self, text: str) -> str:
        """The beginning of a conversation whose first message is a turn: many templates write no prompt without one."""
        header = self._facts.generation_prompt
        return text[: text.index(header) + len(header)] if header in text else ""

    def _end(self, turn: int, text: str) -> int:
        """The place in the whole text at which a turn ends."""
        if turn + 1 == len(self._messages):
            return len(text)
        after = self._template.render(self._messages[: turn + 1], tools=self._tools)
        if self._facts.end.written == "after the turn":
            # Some templates write more after the last turn, such as the end of the text.
            after = after[
                : max(
                    (at + len(token) for token in self._end_tokens() if (at := after.rfind(token)) >= 0), default=None
                )
            ]
        if not text.startswith(after):
            raise self._written_otherwise(turn)
        return len(after)

    def _written_otherwise(self, turn: int) -> ChatTemplateError:
        return ChatTemplateError(
            f"the chat template writes message {turn} otherwise once later messages follow",
            hint="set data.train_on: last, or mark the assistant's words in the template with {% generation %}",
        )

    def _composed(self, turn: int, before: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """The last turn after a prompt that opens its thoughts, which the template leaves out of what it writes."""
        is_alone = turn + 1 == len(self._messages) and not spans
        if not self._facts.opened_thoughts and (is_alone or not self._facts.prompt_is_prefix):
            raise ChatTemplateError(
                f"the chat template writes a prompt for message {turn} that is not how the conversation begins",
                hint="give the row a system message of its own, if the template adds one to prompts alone; or use "
                "another template",
            )
        if not is_alone:
            raise self._written_otherwise(turn)
        said = _with_thoughts(self._messages[turn], self._facts.opened_thoughts)
        if said is None:
            raise ChatTemplateError(
                f"the chat template opens thoughts in the prompt of message {turn}, which has none",
                hint="write them before the answer: <think> ... </think>, or as `reasoning_content`; or have the "
                "template close them, often with data.chat_template_kwargs: {enable_thinking: false}",
            )
        if before.endswith("\n"):
            said = said.lstrip("\n")
        return self._with_ends(before + said, [(len(before), len(before + said))], [turn])

    def _with_ends(self, text: str, spans: Sequence[Span], turns: Sequence[int]) -> tuple[str, list[Span]]:
        """Spans up to the end of the token that ends each turn; one that the text lacks is written after it."""
        ends, found = self._end_tokens(), []
        for start, end in spans:
            last = max((at + len(token) for token in ends if (at := text.rfind(token, start, end)) >= 0), default=-1)
            if last < 0 and self._facts.end.written == "after the turn":
                last = self._other_end(text, start, end)
            if last < 0:
                rest = text[end:].lstrip()
                token = next((token for token in ends if rest.startswith(token)), "")
                last = len(text) - len(rest) + len(token) if token else -1
            if last < 0 and not text[end:].strip() and ends:
                calls = bool(self._messages[turns[-1]].get("tool_calls"))
                text = text[:end] + ends[calls and len(ends) > 1 and self._facts.end.written != "never"]
                last = len(text)
            found.append((start, end if last < 0 else last))
        return text, found

    def _end_tokens(self) -> tuple[str, ...]:
        """Tokens that end a turn: those of the template, or where it writes none, the tokenizer's."""
        own = self._template.tokenizer.eos_token
        return self._facts.end.tokens or ((own,) if isinstance(own, str) else ())

    def _other_end(self, text: str, start: int, end: int) -> int:
        """The end of a turn that ends with another special token than the probed ones; -1: with none."""
        kept = text[start:end].rstrip()
        return start + len(kept) if any(map(kept.endswith, special_texts(self._template.tokenizer))) else -1


def _with_thoughts(message: Mapping[str, Any], opened: str) -> str | None:
    """The words of a turn whose prompt has opened its thoughts; None: it has no thoughts to end."""
    closing = thoughts_end(opened)
    content = message.get("content") or ""
    if not opened or not isinstance(content, str) or message.get("tool_calls"):
        return None
    if thoughts := thoughts_of(message):
        return f"{thoughts.strip()}\n{closing}\n\n{content}"
    return content.lstrip().removeprefix(opened) if closing in content else None
