"""What was sampled in a session, call by call, and the one trajectory that comes of it.

A call's *turn* is its prompt, whole, and the tokens sampled behind it. A turn whose prompt begins with another's tokens
goes on from that one; turns form a tree, because a client may rewrite its history or ask several things at once.

Invariants: sampled tokens stand in a later prompt as they were sampled, never made of text again; the trajectory is the
chain of turns that ends in the last call's; a token of it has mask 1 exactly if it was sampled in a turn of the chain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from generators.agents.transcript import Transcript
from generators.endpoint.messages import Message, same
from generators.engines.base import FinishReason, GenerationResult, SampledTokens

Sampled = GenerationResult | SampledTokens


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer.

    Attributes:
        call, choice: numbers of the call, in the order in which calls arrived, and of the answer to it.
        prompt_ids: all tokens before the answer.
        sampled: the answer's tokens, at least one; all of them sampled.
        finish: why it ended.
        parent: the turn that it goes on from; None: it starts anew.
        messages: the conversation up to and with the answer, in normal form; none of a text completion.
        tools: those offered, as JSON.
        text: of prompt and answer of a text completion, else None.
    """

    call: int
    choice: int
    prompt_ids: tuple[int, ...]
    sampled: Sampled
    finish: FinishReason
    parent: Turn | None
    messages: tuple[Message, ...] = ()
    tools: str = ""
    text: str | None = None
    ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", (*self.prompt_ids, *self.sampled.response_ids.tolist()))

    def chain(self) -> list[Turn]:
        """From the first turn to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


class Record:
    """The turns of a session."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(
        self,
        call: int,
        choice: int,
        prompt_ids: Sequence[int],
        sampled: Sampled,
        finish: FinishReason,
        *,
        messages: Sequence[Message] = (),
        tools: str = "",
        text: str | None = None,
    ) -> Turn:
        """Takes down an answer."""
        turn = self.turn(call, choice, prompt_ids, sampled, finish)
        turn = replace(turn, messages=tuple(messages), tools=tools, text=text)
        self.turns.append(turn)
        return turn

    def turn(
        self,
        call: int,
        choice: int,
        prompt_ids: Sequence[int],
        sampled: Sampled,
        finish: FinishReason,
    ) -> Turn:
        """An answer in its place, not taken down."""
        ids = tuple(prompt_ids)
        return Turn(call, choice, ids, sampled, finish, self.parent_of(ids))

    def parent_of(self, prompt_ids: tuple[int, ...]) -> Turn | None:
        """The turn that a prompt goes on from: the longest whose tokens it begins with."""
        found = [turn for turn in self.turns if prompt_ids[: len(turn.ids)] == turn.ids]
        return max(found, key=lambda turn: len(turn.ids), default=None)

    def extended_by(self, messages: Sequence[Message], tools: str) -> Turn | None:
        """The turn whose conversation goes on in these messages: the longest, and of those the latest."""
        found = [
            turn
            for turn in self.turns
            if 0 < len(turn.messages) < len(messages)
            and turn.tools == tools
            and same(turn.messages, messages[: len(turn.messages)])
        ]
        return max(found, key=lambda turn: (len(turn.messages), turn.call), default=None)

    def extended_by_text(self, text: str) -> Turn | None:
        """The text completion that goes on in this text: the longest, and of those the latest."""
        found = [turn for turn in self.turns if turn.text and text.startswith(turn.text)]
        return max(found, key=lambda turn: (len(turn.text or ""), turn.call), default=None)

    def last(self) -> Turn | None:
        """The turn in which the trajectory ends: of the last call that was answered, its first answer."""
        return max(self.turns, key=lambda turn: (turn.call, -turn.choice), default=None)

    def chain(self, running: Turn | None = None) -> list[Turn]:
        """The turns of the trajectory; `running`: with a turn that is not complete as the last."""
        last = running or self.last()
        return last.chain() if last is not None else []

    def dropped(self, chain: Sequence[Turn]) -> list[Turn]:
        """Turns that no trajectory holds."""
        kept = set(map(id, chain))
        return [turn for turn in self.turns if id(turn) not in kept]

    def to_json(self) -> list[dict[str, Any]]:
        """Turn by turn, for a reader."""
        numbers = {id(turn): index for index, turn in enumerate(self.turns)}
        return [
            {
                "call": turn.call,
                "parent": None if turn.parent is None else numbers[id(turn.parent)],
                "prompt_ids": list(turn.prompt_ids),
                "response_ids": turn.sampled.response_ids.tolist(),
                "log_probs": turn.sampled.log_probs.tolist(),
                "versions": turn.sampled.versions.to_lists(),
                "finish_reason": turn.finish,
            }
            for turn in self.turns
        ]


def branches(turns: Sequence[Turn]) -> int:
    """Ends of chains among turns."""
    parents = {id(turn.parent) for turn in turns}
    return sum(id(turn) not in parents for turn in turns)


def transcript(chain: Sequence[Turn], prompt_ids: Sequence[int]) -> Transcript | None:
    """The response that a chain is behind a prompt; None: it does not begin with that prompt.

    Args:
        chain: as `Turn.chain` gives it, at least one turn.
        prompt_ids: at least one token.
    """
    if chain[0].prompt_ids[: len(prompt_ids)] != tuple(prompt_ids):
        return None
    found = Transcript(prompt_ids)
    for turn in chain:
        found.add_masked(turn.prompt_ids[len(prompt_ids) + found.length :])
        found.add_turn(turn.sampled)
    return found


def tools_key(tools: Sequence[Any]) -> str:
    """Tools in a form that can be compared."""
    return json.dumps(tools, sort_keys=True) if tools else ""
