"""The record of a session, straight: every turn whole, every look-up through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class StraightTurn:
    call: int
    choice: int
    prompt_ids: tuple[int, ...]
    answer: tuple[int, ...]
    parent: StraightTurn | None
    messages: Messages = ()
    tools: str = ""
    text: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer

    def chain(self) -> list[StraightTurn]:
        return [*(self.parent.chain() if self.parent is not None else []), self]


class StraightRecord:
    def __init__(self) -> None:
        self.turns: list[StraightTurn] = []

    def parent_of(self, prompt_ids: tuple[int, ...]) -> StraightTurn | None:
        found = [turn for turn in self.turns if prompt_ids[: len(turn.ids)] == turn.ids]
        return max(found, key=lambda turn: len(turn.ids), default=None)

    def longest_known(self, messages: Messages, tools: str) -> StraightTurn | None:
        found = [
            turn
            for turn in self.turns
            if 0 < len(turn.messages) <= len(messages) and list(turn.messages) == list(messages[: len(turn.messages)])
        ]
        return max(found, key=lambda turn: (len(turn.messages), turn.tools == tools, turn.call), default=None)

    def extended_by_text(self, text: str) -> StraightTurn | None:
        found = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        return max(found, key=lambda turn: (len(turn.text), turn.call), default=None)

    def last(self) -> StraightTurn:
        return max(self.turns, key=lambda turn: (turn.call, -turn.choice))

    def trajectory(self, prompt: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
        """Response and mask."""
        chain = self.last().chain()
        if chain[0].prompt_ids[: len(prompt)] != prompt:
            return None
        ids: list[int] = []
        mask: list[int] = []
        for turn in chain:
            between = turn.prompt_ids[len(prompt) + len(ids) :]
            ids += [*between, *turn.answer]
            mask += [0] * len(between) + [1] * len(turn.answer)
        return ids, mask

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "call": turn.call,
                "parent": None if turn.parent is None else self.turns.index(turn.parent),
                "prompt_ids": list(turn.prompt_ids[len(turn.parent.ids) if turn.parent is not None else 0 :]),
                "response_ids": list(turn.answer),
            }
            for turn in self.turns
        ]
