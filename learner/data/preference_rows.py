"""Rows of preferences: pairs of responses to one prompt, or single responses with a label.

Forms (TRL's): `chosen` and `rejected`, each a text or messages, with `prompt` or with a common beginning; `prompt`,
`completion` and `label`. Pairs of reward models may have a `margin`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.chat_turns import ChatEncoder, MaskedTokens, Messages
from rollmesh.learner.data.examples import Example, sequence_from, sequence_of
from rollmesh.learner.data.records import Record, RecordSource
from rollmesh.learner.data.row_fields import as_messages, refuse_images, text_or_messages
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


class _Rows:
    """The examples of a file, a row at a time.

    Args:
        source: its records.
        chat: encodes conversations.
        section: forms of the rows, and their longest.
    """

    def __init__(self, source: RecordSource, chat: ChatEncoder, section: RowsSection) -> None:
        self._source = source
        self._chat = chat
        self._section = section

    def __len__(self) -> int:
        return len(self._source)

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


class PairRows(_Rows):
    """Pairs.

    Args:
        source, chat, section: see `_Rows`.
        make: a sequence of each response's tokens.
        margins: read the pairs' margins.
    """

    def __init__(
        self,
        source: RecordSource,
        chat: ChatEncoder,
        section: RowsSection,
        *,
        make: MakeSequence = sequence_of,
        margins: bool = False,
    ) -> None:
        super().__init__(source, chat, section)
        self._make = make
        self._margins = margins

    def examples(self, rows: Sequence[int]) -> list[Example | None]:
        """See `ExampleSource`."""
        return [self._example(row, record) for row, record in zip(rows, self._source.records(rows), strict=True)]

    def _example(self, row: int, record: Record) -> Example | None:
        try:
            refuse_images(record)
            chosen, rejected = text_or_messages(record, "chosen"), text_or_messages(record, "rejected")
            if record.get("prompt") is not None:
                prompt = text_or_messages(record, "prompt")
            else:
                prompt, chosen, rejected = split_prompt(chosen, rejected)
            encoded = [self._encode(prompt, response) for response in (chosen, rejected)]
            margin = _margin(record) if self._margins else None
        except DataError as error:
            raise DataError(f"row {row}: {error.message}", hint=error.hint) from error
        sequences = [self._make(tokens) for tokens in encoded if tokens is not None]
        made = tuple(sequence for sequence in sequences if sequence is not None)
        if len(made) < len(encoded):
            return None
        return Example(made, {} if margin is None else {"margin": (margin, margin)})


class LabeledRows(_Rows):
    """Single responses, each with one of the next row's, which belongs to another prompt.

    KTO estimates how far the policy has moved by responses to the wrong prompts. Those are the same in every epoch.
    """

    def examples(self, rows: Sequence[int]) -> list[Example | None]:
        """See `ExampleSource`."""
        count = len(self)
        needed = sorted({place % count for row in rows for place in (row, row + 1)})
        records = dict(zip(needed, self._source.records(needed), strict=True))
        return [self._example(row, records[row], records[(row + 1) % count]) for row in rows]

    def _example(self, row: int, record: Record, following: Record) -> Example | None:
        try:
            refuse_images(record)
            prompt = text_or_messages(record, "prompt")
            if not isinstance(record.get("label"), bool | int):
                raise DataError("field `label` is not true or false", hint="see docs/trainers.md")
            responses = [text_or_messages(each, "completion") for each in (record, following)]
            encoded = [self._encode(prompt, response) for response in responses]
        except DataError as error:
            raise DataError(f"row {row}: {error.message}", hint=error.hint) from error
        sequences = [sequence_of(tokens) for tokens in encoded if tokens is not None]
        made = tuple(sequence for sequence in sequences if sequence is not None)
        if len(made) < len(encoded):
            return None
        label = float(bool(record["label"]))
        return Example(made, {"label": (label, label)})


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
