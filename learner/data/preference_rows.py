"""Rows of preferences: pairs of responses to one prompt, or single responses with a label.

Forms (TRL's): `chosen` and `rejected`, each a text or messages, with `prompt` or with a common beginning; `prompt`,
`completion` and `label`. Pairs of reward models may have a `margin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.chat_turns import ChatEncoder, MaskedTokens, Messages
from rollmesh.learner.data.examples import Example, ExampleForm, sequence_from, sequence_of
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_fields import as_messages, text_or_messages, value_at
from rollmesh.learner.data.supervised_rows import continuation, fit
from rollmesh.mesh.config.trainers.sections import RowsSection
from rollmesh.mesh.errors import DataError

Text = str | Messages
MakeSequence = Callable[[MaskedTokens], TrainSequence | None]


def scored_at_its_end(tokens: MaskedTokens) -> TrainSequence | None:
    """A sequence with one result, at the last token of its response; None without one.

    The result that stands for a token is read one place before it. So it is that of a further token, which no model
    sees.
    """
    places = np.flatnonzero(tokens.trained[1:]) + 1
    if not len(places):
        return None
    response = np.append(tokens.ids[places[0] : places[-1] + 1], np.int32(0))
    mask = np.zeros(len(response), dtype=np.uint8)
    mask[-1] = 1
    return sequence_from(tokens.ids[: places[0]], response, mask)


class _ResponseForm(ExampleForm):
    """Responses to prompts.

    Args:
        chat: encodes conversations.
        section: forms of the rows, and their longest.
        prompt_key: field of the prompt.
    """

    def __init__(self, chat: ChatEncoder, section: RowsSection, prompt_key: str) -> None:
        self._chat = chat
        self._section = section
        self._prompt_key = prompt_key

    def _sequences(self, prompt: Text, responses: Sequence[Text], make: MakeSequence) -> tuple[TrainSequence, ...]:
        """A sequence of each response; none at all where one is too long, or has nothing to train."""
        encoded = [self._encode(prompt, response) for response in responses]
        made = [None if tokens is None else make(tokens) for tokens in encoded]
        there = tuple(sequence for sequence in made if sequence is not None)
        return there if len(there) == len(made) else ()

    def _encode(self, prompt: Text, response: Text) -> MaskedTokens | None:
        """A prompt with a response, which is trained; None where it is too long."""
        if isinstance(prompt, str) and isinstance(response, str):
            tokens = continuation(self._chat.tokenizer, prompt, response)
        else:
            before = as_messages(prompt, "user") if prompt else []
            messages = [*before, *as_messages(response, "assistant")]
            turns = [i for i, message in enumerate(messages) if i >= len(before) and message["role"] == "assistant"]
            tokens = self._chat.encode(messages, turns)
        return fit(tokens, self._section.max_tokens, self._section.on_long)


class PairForm(_ResponseForm):
    """The form of a source's pairs.

    Args:
        chat, section, prompt_key: see `_ResponseForm`.
        make: a sequence of each response's tokens.
        margins: read the pairs' margins.
    """

    needed = ("chosen", "rejected")

    def __init__(
        self,
        chat: ChatEncoder,
        section: RowsSection,
        prompt_key: str,
        *,
        make: MakeSequence = sequence_of,
        margins: bool = False,
    ) -> None:
        super().__init__(chat, section, prompt_key)
        self._make = make
        self._margins = margins

    def read(self, record: Record) -> tuple[Text, Text, Text]:
        """Prompt, chosen and rejected response."""
        chosen, rejected = text_or_messages(record, "chosen"), text_or_messages(record, "rejected")
        if value_at(record, self._prompt_key) is not None:
            return text_or_messages(record, self._prompt_key), chosen, rejected
        return split_prompt(chosen, rejected)

    def encode(self, record: Record) -> Example | None:
        prompt, *responses = self.read(record)
        margin = _margin(record) if self._margins else None
        if not (sequences := self._sequences(prompt, responses, self._make)):
            return None
        return Example(sequences, {} if margin is None else {"margin": (margin, margin)})


class LabeledForm(_ResponseForm):
    """The form of a source's single responses, good or bad."""

    needed = ("completion", "label")

    def read(self, record: Record) -> tuple[Text, Text, bool]:
        """Prompt, response, and whether that is good."""
        prompt = text_or_messages(record, self._prompt_key)
        if not isinstance(label := record.get("label"), bool | int):
            raise DataError("field `label` is not true or false", hint="see docs/trainers.md")
        return prompt, text_or_messages(record, "completion"), bool(label)

    def encode(self, record: Record) -> Example | None:
        prompt, response, label = self.read(record)
        sequences = self._sequences(prompt, [response], sequence_of)
        return Example(sequences, {"label": (float(label),)}) if sequences else None


def split_prompt(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """The common beginning of two texts or conversations, and what follows in each.

    Texts are divided before a space, where tokenizers begin words.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        pairs = enumerate(zip(chosen, rejected, strict=False))
        common = next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        space = chosen.rfind(" ", 0, common + 1)
        cut = common if common in (len(chosen), len(rejected)) else max(space, 0)
        return chosen[:cut], chosen[cut:], rejected[cut:]
    first, second = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    same = 0
    # Each keeps a message of its own.
    while same < min(len(first), len(second)) - 1 and first[same] == second[same]:
        same += 1
    return first[:same], first[same:], second[same:]


def _margin(record: Record) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if not isinstance(margin, int | float) or isinstance(margin, bool):
        raise DataError("field `margin` is not a number")
    return float(margin)
