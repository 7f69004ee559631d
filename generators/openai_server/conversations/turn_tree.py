"""The turns of a session, call by call, and the one trajectory that they make.

A call's *turn* is its prompt and the tokens sampled after it. A turn whose prompt begins with another's tokens
continues that one, and holds only what follows them. Turns form a tree, because a client may rewrite its history or ask
several things at once.

Invariants: sampled tokens stand in a later prompt as they were sampled, never made of text again. The trajectory is the
chain of turns that ends in the last call's. A token of it has mask 1 exactly if it was sampled in a turn of the chain.
To locate a call costs its new tokens, however long the session. Turns are added in the event loop's thread; any thread
may look them up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.agents.transcript import Transcript
from rollmesh.generators.engines.types import FinishReason
from rollmesh.generators.openai_server.conversations.conversation_keys import ConversationKey
from rollmesh.generators.openai_server.conversations.known_answers import AnswerPlace, Followed, KnownAnswers
from rollmesh.generators.openai_server.conversations.messages import Message
from rollmesh.generators.openai_server.conversations.prefix_index import PrefixIndex, Totals, totals
from rollmesh.mesh.trajectory.payload_codec import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class PromptPosition:
    """The position of a prompt in the tree.

    Attributes:
        parent: the turn that its prompt continues; None: none.
        new_ids: int32: the prompt's tokens after those of the parent.
        length: tokens of the whole prompt.
        total: of the whole prompt (`prefix_index`).
    """

    parent: Turn | None
    new_ids: NDArray[np.int32]
    length: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn: one answer of the model and its prompt.

    Attributes:
        call, choice: numbers of the call, in the order in which calls arrived, and of the answer to it.
        position: of its prompt.
        sampled: the answer's tokens, at least one; all of them sampled.
        finish: why it ended.
        total: of prompt and answer (`prefix_index`); 0 of one that is not complete.
    """

    call: int
    choice: int
    position: PromptPosition
    sampled: Trajectory
    finish: FinishReason
    total: int = 0

    @property
    def parent(self) -> Turn | None:
        """The turn that it continues."""
        return self.position.parent

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.position.length + len(self.sampled)

    def chain(self) -> list[Turn]:
        """The turns from the first to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> NDArray[np.int32]:
        """All tokens, prompt and answer."""
        parts = [part for turn in self.chain() for part in (turn.position.new_ids, turn.sampled.response_ids)]
        return np.concatenate(parts)


class TurnTree:
    """The turns of a session.

    Attributes:
        turns: as they were answered.
        tokens: kept in all.
        messages: the conversation up to and with the last turn's answer, in normal form; empty for a text completion.
        last_text: the text of that answer.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens = 0
        self.messages: tuple[Message, ...] = ()
        self.last_text = ""
        self._last: Turn | None = None
        self._lock = threading.Lock()
        self._ends: PrefixIndex[Turn] = PrefixIndex()
        self._texts: PrefixIndex[Turn] = PrefixIndex()
        self._chats: KnownAnswers[Turn] = KnownAnswers()

    def locate(self, before: Turn | None, new_ids: Sequence[int]) -> PromptPosition:
        """The position of a prompt: after the longest turn that it continues, token by token.

        Args:
            before: a turn that the prompt is known to continue.
            new_ids: the prompt's tokens after those.
        """
        ids = np.asarray(new_ids, np.int32)
        start, total = (0, 0) if before is None else (before.length, before.total)
        prefix_totals = totals(ids, start, total)
        with self._lock:
            match = self._ends.longest(prefix_totals, start)
        length, parent = match or (start, None)
        return PromptPosition(parent, ids[length - start :], start + len(ids), int(prefix_totals[-1]))

    def add(
        self,
        call: int,
        choice: int,
        position: PromptPosition,
        sampled: Trajectory,
        finish: FinishReason,
        *,
        key: ConversationKey | None = None,
        place: AnswerPlace | None = None,
        messages: Sequence[Message] = (),
        text: str = "",
    ) -> Turn:
        """Adds an answer.

        Args:
            call, choice, position, sampled, finish: see `Turn`.
            key: of a text completion: prompt and answer as the client will send them when it continues.
            place: of a chat's answer.
            messages, text: see `messages` and `last_text` of `TurnTree`.
        """
        total = int(totals(sampled.response_ids, position.length, position.total)[-1])
        turn = Turn(call, choice, position, sampled, finish, total)
        self.turns.append(turn)
        self.tokens += len(position.new_ids) + len(sampled)
        if self._last is None or (call, -choice) > (self._last.call, -self._last.choice):
            self._last, self.messages, self.last_text = turn, tuple(messages), text
        with self._lock:
            self._ends.add(turn.length, total, turn)
            if key is not None:
                earlier = self._texts.get(*key)
                if earlier is None or earlier.call < call:
                    self._texts.put(*key, turn)
        if place is not None:
            self._chats.add(turn, place)
        return turn

    def follow(self, messages: Sequence[Message], tools: Sequence[Any]) -> Followed[Turn]:
        """Follows a chat through the answers of this session.

        Args:
            messages: in normal form.
            tools: offered with them.
        """
        return self._chats.follow(messages, tools)

    def longest_known(self, conversation_totals: Totals) -> tuple[int, Turn] | None:
        """The turn with the longest text that another one begins with, and its length; of several the latest.

        Args:
            conversation_totals: of all beginnings of the other text that count.
        """
        with self._lock:
            return self._texts.longest(conversation_totals)

    def last(self) -> Turn | None:
        """The turn in which the trajectory ends: of the last call that was answered, its first answer."""
        return self._last

    def chain(self) -> list[Turn]:
        """The turns of the trajectory."""
        return self._last.chain() if self._last is not None else []

    def dropped(self, chain: Sequence[Turn]) -> list[Turn]:
        """Turns that no trajectory holds."""
        kept = set(map(id, chain))
        return [turn for turn in self.turns if id(turn) not in kept]

    def to_json(self) -> list[dict[str, Any]]:
        """Turn by turn, for a reader; prompts without the tokens of the turns that they continue."""
        turns = list(self.turns)
        numbers = {id(turn): index for index, turn in enumerate(turns)}
        return [
            {
                "call": turn.call,
                "parent": None if turn.parent is None else numbers[id(turn.parent)],
                "prompt_ids": turn.position.new_ids.tolist(),
                "response_ids": turn.sampled.response_ids.tolist(),
                "log_probs": turn.sampled.log_probs.tolist(),
                "versions": turn.sampled.versions.to_lists(),
                "finish_reason": turn.finish,
            }
            for turn in turns
        ]


def branches(turns: Sequence[Turn]) -> int:
    """Number of chains among turns."""
    parents = {id(turn.parent) for turn in turns}
    return sum(id(turn) not in parents for turn in turns)


def transcript(chain: Sequence[Turn], prompt_ids: Sequence[int]) -> Transcript | None:
    """The response that a chain is after a prompt; None: it does not begin with that prompt.

    Args:
        chain: as `Turn.chain` gives it, at least one turn.
        prompt_ids: at least one token.
    """
    first = chain[0].position.new_ids
    if first[: len(prompt_ids)].tolist() != list(prompt_ids):
        return None
    response = Transcript(prompt_ids)
    for turn in chain:
        between = turn.position.new_ids if turn.parent is not None else first[len(prompt_ids) :]
        response.add_masked(between.tolist())
        response.add_turn(turn.sampled)
    return response
