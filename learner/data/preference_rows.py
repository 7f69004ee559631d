"""Rows of preferences: pairs of responses to one prompt, or single responses with a label.

Forms (TRL's): `chosen` and `rejected`, each a text or messages, with `prompt` or with a common beginning; `prompt`,
`completion` and `label`. Pairs of reward models may have a `margin`. Responses may be whole conversations.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import LABEL, Example, ExampleForm, LeftOut, sequence_from, sequence_of
from rollmesh.learner.data.parts.answers import (
    ANSWERS,
    AS_CHAT,
    Text,
    as_messages,
    divide,
    messages_of,
    no_chat,
    split_last_answer,
    split_prompt,
)
from rollmesh.learner.data.parts.messages import same_message
from rollmesh.learner.data.parts.shown_tools import shown_tools, tools_of
from rollmesh.learner.data.parts.template_arguments import read_template_arguments
from rollmesh.learner.data.parts.template_marks import TemplateMarks
from rollmesh.learner.data.parts.turn_flags import trained_turns, without_flags
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_fields import read_field, refuse_beside_texts, value_at, with_system
from rollmesh.learner.data.supervised_rows import Conversation, within_limit
from rollmesh.mesh.config.trainers.sections import RowsSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.masked_text import MaskedTokens, continuation, tokenize_spans
from rollmesh.mesh.scored_text import response_text, scored_tokens

# Fields in which published answers have their prompt, where it is not `prompt`.
_PROMPTS = ("question", "instruction", "query", "input", "problem")
_CONVERSATIONS = ("conversations", "conversation", "messages", "context")
_LARGEST_MARGIN = float(np.finfo(np.float32).max)


class _ResponseForm(ExampleForm):
    """Responses to prompts.

    Args:
        chat: encodes conversations.
        section: forms of the rows, and their longest.
        prompt_key: field of the prompt.
    """

    def __init__(self, chat: ChatEncoder, section: RowsSection, prompt_key: str) -> None:
        self._chat = chat
        self._marks = TemplateMarks(chat.tokenizer)
        self._section = section
        self._prompt_key = prompt_key

    def _given(self, record: Record, response: Text) -> Text | None:
        """The prompt that a row gives; None without one. Next to a conversation a blank text is none."""
        if value_at(record, self._prompt_key) is None:
            return None
        given = read_field(record, self._prompt_key)
        blank = isinstance(given, str) and not given.strip() and not isinstance(response, str)
        return None if blank else given

    def _divided(self, given: Text, responses: Mapping[str, Text]) -> tuple[Text, Sequence[Text]]:
        """The prompt of a row, and what each response says beyond it: all of them texts, or all messages."""
        if not self._section.as_chat and all(isinstance(text, str) for text in (given, *responses.values())):
            return divide(given, responses, self._prompt_key)
        return messages_of(given, responses, self._prompt_key, whole=True)

    def _example(self, prompt: Text, responses: Sequence[Text], record: Record) -> Example | LeftOut:
        """A sequence of each response; left out where one of them is."""
        sequences = []
        for response in responses:
            if isinstance(sequence := self._sequence(prompt, response, record), LeftOut):
                return sequence
            sequences.append(sequence)
        missed = self._may_be_chat(prompt, record) and self._marks.are_missing(str(prompt))
        return Example(tuple(sequences), misses_template=missed)

    def _sequence(self, prompt: Text, response: Text, record: Record) -> TrainSequence | LeftOut:
        """A prompt with a response, which is trained."""
        if isinstance(prompt, str) and isinstance(response, str):
            tokens = continuation(self._chat.tokenizer, prompt, response)
        else:
            found = _conversation(prompt, response, record)
            tokens = self._chat.encode(found.messages, found.turns, found.tools, found.arguments)
        fitting = self._fit(tokens)
        return fitting if isinstance(fitting, LeftOut) else sequence_of(fitting)

    def _fit(self, tokens: MaskedTokens) -> MaskedTokens | LeftOut:
        return within_limit(tokens, self._section.max_tokens, self._section.on_long)

    def _may_be_chat(self, prompt: Text, record: Record) -> bool:
        """Whether `data.as_chat` takes a prompt: it is the text of its field, and no other beginning of answers."""
        given = value_at(record, self._prompt_key)
        return isinstance(given, str) and isinstance(prompt, str) and given.rstrip() == prompt.rstrip() != ""

    def _check_beside(self, prompt: Text, response: Text, record: Record) -> None:
        """Checks flags, tools and system prompt, without a tokenizer."""
        if isinstance(prompt, str) and isinstance(response, str):
            remedy = AS_CHAT if self._may_be_chat(prompt, record) else "write the prompt and the responses as messages"
            refuse_beside_texts(record, remedy)
        else:
            _conversation(prompt, response, record)


class PairForm(_ResponseForm):
    """The form of a source's pairs; see `_ResponseForm`."""

    _needed = ("chosen", "rejected")
    _labels_belong = "single responses with labels are trained with loss.name: kto"

    def advice(self, record: Record) -> str:
        if all(record.get(name) is not None for name in self._needed):
            return ""
        if not any(name in record for name in self._needed) and "completion" in record and "label" in record:
            return self._labels_belong
        return "a pair has `chosen` and `rejected`, and `prompt` or a common beginning: see docs/trainers.md"

    def read(self, record: Record) -> tuple[Text, Text, Text]:
        """Prompt, chosen and rejected response."""
        chosen, rejected = read_field(record, "chosen"), read_field(record, "rejected")
        if (given := self._given(record, chosen)) is None:
            prompt, chosen, rejected = split_prompt(chosen, rejected)
            if isinstance(chosen, str) or not prompt:
                _check_prompt(record, prompt, chosen)
            if isinstance(chosen, str) and self._section.as_chat:
                raise no_chat(self._prompt_key)
        else:
            prompt, (chosen, rejected) = self._divided(given, {"chosen": chosen, "rejected": rejected})
        _check_beginnings(chosen, rejected)
        for response in (chosen, rejected):
            self._check_beside(prompt, response, record)
        return prompt, chosen, rejected

    def encode(self, record: Record) -> Example | LeftOut:
        prompt, *responses = self.read(record)
        return self._example(prompt, responses, record)


class ScoredPairForm(PairForm):
    """The form of a source's pairs whose responses a reward model scores, with their margins.

    A response has the tokens that the reward model will be served with (`mesh.scored_text`).
    """

    _labels_belong = "a reward model needs pairs; `rollmesh dpo` with loss.name: kto takes single responses with labels"

    def read(self, record: Record) -> tuple[Text, Text, Text]:
        _margin(record)
        return super().read(record)

    def encode(self, record: Record) -> Example | LeftOut:
        margin, example = _margin(record), super().encode(record)
        return example if isinstance(example, LeftOut) else replace(example, values={"margin": (margin, margin)})

    def _sequence(self, prompt: Text, response: Text, record: Record) -> TrainSequence | LeftOut:
        tokenizer = self._chat.tokenizer
        if isinstance(prompt, str) and isinstance(response, str):
            before = prompt
            said = tokenize_spans(
                tokenizer, prompt + response, [(len(prompt), len(prompt + response))], special_tokens=True
            )
        else:
            found = _conversation(prompt, response, record)
            text, spans = self._chat.render(found.messages, found.turns[-1:], found.tools, found.arguments)
            if not spans:
                return LeftOut.UNTRAINED
            (first, last) = spans[0]
            before = text[:first]
            said = tokenize_spans(tokenizer, text[:last], [(first, last)], special_tokens=False)
        tokens = scored_tokens(tokenizer, before, response_text(tokenizer, said.ids[said.trained].tolist()))
        fitting = self._fit(tokens)
        if isinstance(fitting, LeftOut):
            return fitting
        if tokenizer.eos_token_id is not None:
            # A response that was cut off is scored there too.
            fitting.ids[-1] = tokenizer.eos_token_id
        return scored_at_its_end(fitting)


class LabeledForm(_ResponseForm):
    """The form of a source's single responses, good or bad."""

    _needed = ("completion", "label")

    def advice(self, record: Record) -> str:
        if all(record.get(name) is not None for name in self._needed):
            return ""
        if "chosen" in record and "rejected" in record:
            return "pairs are trained with loss.name: sigmoid, or ipo"
        return "a labeled response has `prompt`, `completion` and `label`: see docs/trainers.md"

    def read(self, record: Record) -> tuple[Text, Text, bool]:
        """Prompt, response, and whether that is good."""
        if (label := record.get("label")) is None:
            raise DataError("field `label` is missing")
        # Tables may have 0 and 1. Other numbers may mean either: -1 would be as true as 1.
        if not isinstance(label, int) or label not in (0, 1):
            raise DataError(
                f"field `label` is {reprlib.repr(label)}, expected true or false (or 1 or 0)",
                hint="write true for a good response, and false for a bad one",
            )
        prompt: Text
        completion = read_field(record, "completion")
        if (given := self._given(record, completion)) is None:
            prompt, completion = split_last_answer(completion, "completion")
        else:
            prompt, (completion,) = self._divided(given, {"completion": completion})
        self._check_beside(prompt, completion, record)
        return prompt, completion, bool(label)

    def encode(self, record: Record) -> Example | LeftOut:
        prompt, response, label = self.read(record)
        example = self._example(prompt, [response], record)
        return example if isinstance(example, LeftOut) else replace(example, values={LABEL: (float(label),)})


def scored_at_its_end(tokens: MaskedTokens) -> TrainSequence | LeftOut:
    """A sequence with one result, at the last token of its response.

    The result that stands for a token is read one place before it. So it is that of a further token, which no model
    sees.
    """
    places = np.flatnonzero(tokens.trained[1:]) + 1
    if not len(places):
        return LeftOut.UNTRAINED
    response = np.append(tokens.ids[places[0] : places[-1] + 1], np.int32(0))
    mask = np.zeros(len(response), dtype=np.uint8)
    mask[-1] = 1
    return sequence_from(tokens.ids[: places[0]], response, mask)


def _conversation(prompt: Text, response: Text, record: Record) -> Conversation:
    """A prompt and a response as messages; those of the response are trained."""
    said = as_messages(response, "assistant")
    whole = with_system([*(as_messages(prompt, "user") if prompt else []), *said], record)
    turns = trained_turns(whole, len(whole) - len(said))
    messages, tools = shown_tools(tools_of(record), without_flags(whole))
    return Conversation(messages, turns, tools or None, read_template_arguments(record))


def _check_prompt(record: Record, prompt: Text, chosen: Text) -> None:
    """Refuses answers that stand alone: what they have in common is no prompt, and another field is."""
    whole = f"{prompt}{chosen}"
    asked = next((key for key in _PROMPTS if isinstance(text := record.get(key), str) and text not in whole), None)
    alone = not prompt and (isinstance(chosen, str) or chosen[0]["role"] in ANSWERS)
    if asked is not None or alone:
        key = next((key for key in (asked, *_CONVERSATIONS) if key is not None and record.get(key)), None)
        raise DataError(
            "its answers stand alone, without the prompt to which they answer",
            hint=f"set data.prompt_key: {key}" if key else "data.prompt_key names the field with the prompt",
        )


def _check_beginnings(chosen: Text, rejected: Text) -> None:
    """Refuses conversations that differ before the first answer: one prompt would not have been given the other's."""
    if isinstance(chosen, str) or isinstance(rejected, str) or same_message(chosen[0], rejected[0]):
        return
    for name, response in (("chosen", chosen), ("rejected", rejected)):
        if response[0]["role"] not in ANSWERS:
            raise DataError(
                f"fields `chosen` and `rejected` differ before an answer: `{name}` has a message of the role "
                f"{response[0]['role']} that the other one has not",
                hint="give both the same messages before the answer",
            )


def _margin(record: Record) -> float:
    if (margin := record.get("margin")) is None:
        return 0.0
    if not isinstance(margin, int | float) or isinstance(margin, bool):
        raise DataError("field `margin` is not a number")
    # The loss has it in float32. Integers are compared before they are converted: one may exceed all floats.
    if not abs(margin) <= _LARGEST_MARGIN:
        raise DataError(
            f"field `margin` is {reprlib.repr(margin)}, expected a finite number in the range of float32",
            hint="correct the row, or leave its margin out",
        )
    return float(margin)
