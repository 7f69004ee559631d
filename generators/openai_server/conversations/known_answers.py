"""The answers of a session by what was said before them: finds the one that a later call continues.

Invariants: a conversation is followed message by message. An assistant's message with the meaning of an answer that was
given at that place is that answer. From there on the answer's own meaning counts, in whichever form it came back. Where
several answers have the same meaning, the one with the call's own tools is taken, then the latest. Tools are no part of
a conversation: they stand in the prompt of its first turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rollmesh.generators.openai_server.conversations.meaning import (
    ROOT,
    AnswerMeaning,
    adds_nothing,
    answer_meaning,
    extended,
    message_meaning,
    tools_digest,
)
from rollmesh.generators.openai_server.conversations.messages import Message
from rollmesh.mesh.trajectory.branches import Cause


class AnsweredTurn(Protocol):
    """A turn, as far as this index knows it."""

    @property
    def call(self) -> int:
        """The number of its call."""


T = TypeVar("T", bound=AnsweredTurn)
_Key = tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """The place of an answer among the conversations of a session.

    Attributes:
        before: digest of the conversation before it.
        conversation: the same with the answer.
        meanings: of the forms in which it may come back.
        tools: that its prompt shows.
        tools_digest: of these.
        text: of a call with stop strings: all of it, with the stop string that has ended it; else empty.
        stops: these strings; empty where one has ended it, so that text may be added to it.
    """

    before: bytes
    conversation: bytes
    meanings: tuple[AnswerMeaning, ...]
    tools: Sequence[Any]
    tools_digest: bytes
    text: str
    stops: tuple[str, ...]

    @classmethod
    def of(
        cls, before: bytes, message: Message, tools: Sequence[Any], text: str = "", stops: tuple[str, ...] = ()
    ) -> AnswerPlace:
        """The place of an answer.

        Args:
            before, tools, text, stops: see the attributes.
            message: the answer in normal form.
        """
        meaning, text = answer_meaning(message), text.strip()
        # A client may put the stop string back.
        meanings = (meaning, answer_meaning({**message, "content": text})) if text else (meaning,)
        return cls(before, extended(before, meaning.whole), meanings, tools, tools_digest(list(tools)), text, stops)


class KnownAnswer(NamedTuple, Generic[T]):
    """An answer that was given: its turn and its place."""

    turn: T
    place: AnswerPlace


@dataclass(frozen=True, slots=True)
class Followed(Generic[T]):
    """A conversation, followed as far as it is known.

    Attributes:
        conversation: its digest.
        answer: the last answer in it; None: it has none.
        length: messages up to and with that answer.
        added: text that the client has added to that answer's end.
        cause: why it does not continue the answers that were given; None: it does, or there are none.
    """

    conversation: bytes = ROOT
    answer: KnownAnswer[T] | None = None
    length: int = 0
    added: str = ""
    cause: Cause | None = None


class KnownAnswers(Generic[T]):
    """See the module. One thread adds, and any may look up: each step is a single one of a dictionary or a list."""

    def __init__(self) -> None:
        # By the conversation before the answer, its meaning, and the tools (empty: of any).
        self._whole: dict[_Key, KnownAnswer[T]] = {}
        self._bare: dict[_Key, KnownAnswer[T]] = {}
        self._open: dict[bytes, list[KnownAnswer[T]]] = {}
        self._asked: set[bytes] = set()

    def add(self, turn: T, place: AnswerPlace) -> None:
        """Adds an answer."""
        answer = KnownAnswer(turn, place)
        for meaning in place.meanings:
            for tools in (place.tools_digest, b""):
                _put(self._whole, (place.before, meaning.whole, tools), answer)
                _put(self._bare, (place.before, meaning.bare, tools), answer)
        if place.text:
            self._open.setdefault(place.before, []).append(answer)
        self._asked.add(place.before)

    def follow(self, messages: Sequence[Message], tools: Sequence[Any]) -> Followed[T]:
        """Follows a conversation.

        Args:
            messages: in normal form.
            tools: offered with them.
        """
        offered = tools_digest(list(tools))
        conversation, answer, length, added = ROOT, None, 0, ""
        cause: Cause | None = None
        places: Mapping[str, int] = {}
        answered = False
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                answered = True
                found, more = self._find(conversation, message, offered)
                calls = message.get("tool_calls") or []
                places = {call["id"]: place for place, call in enumerate(calls) if "id" in call}
                if found is not None:
                    conversation = found.place.conversation
                    if more:
                        conversation = extended(conversation, more.encode("utf-8", "surrogatepass"))
                    answer, length, added, cause = found, index + 1, more, None
                    continue
                if cause is None and self._asked:
                    cause = Cause.REWRITTEN if conversation in self._asked else Cause.HISTORY
            conversation = extended(conversation, message_meaning(message, places))
        if cause is None and self._asked:
            if conversation in self._asked:
                cause = Cause.REPEATED
            elif answer is None and not answered:
                cause = Cause.ANOTHER
        return Followed(conversation, answer, length, added, cause)

    def _find(self, conversation: bytes, message: Message, offered: bytes) -> tuple[KnownAnswer[T] | None, str]:
        if conversation not in self._asked:
            return None, ""
        meaning = answer_meaning(message)
        for tools in (offered, b""):
            found = self._whole.get((conversation, meaning.whole, tools))
            # Thoughts that are there have to be the same; a client may leave them out as templates do.
            if found is None and meaning.bare == meaning.whole:
                found = self._bare.get((conversation, meaning.bare, tools))
            if found is not None:
                return found, ""
        return self._find_extended(conversation, message)

    def _find_extended(self, conversation: bytes, message: Message) -> tuple[KnownAnswer[T] | None, str]:
        """An answer to a call with stop strings that the message continues, and the text that is to be fed after it."""
        text = (message.get("content") or "").strip()
        if message.get("tool_calls"):
            return None, ""
        found = [answer for answer in self._open.get(conversation, ()) if text.startswith(answer.place.text)]
        for answer in sorted(found, key=lambda answer: (len(answer.place.text), answer.turn.call), reverse=True):
            more = text[len(answer.place.text) :]
            if not answer.place.stops:
                return answer, more
            if any(adds_nothing(more, stop, answer.place.text) for stop in answer.place.stops):
                return answer, ""
        return None, ""


def _put(answers: dict[_Key, KnownAnswer[T]], key: _Key, answer: KnownAnswer[T]) -> None:
    earlier = answers.get(key)
    if earlier is None or earlier.turn.call < answer.turn.call:
        answers[key] = answer
