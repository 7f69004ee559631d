"""What drives an episode between the model's turns: the two kinds of it, and here, tools without an environment.

Invariants: an environment that breaks raises `BrokenError`, which ends the episode as an error; a tool that breaks is
an observation. A driver is either stateless, and then what it answered is read off a draft, or stateful, and then it is
taken through a draft's turns again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollmesh.generators.agents.chat_template import ChatRenderer, Message
from rollmesh.generators.agents.tool_call_parsers import Parser
from rollmesh.generators.agents.tool_calls import ParsedTurn, ToolCall
from rollmesh.generators.agents.toolbox import Observation, Toolbox

# Calls of one turn that are run; further ones are answered with an error.
_MAX_CALLS = 16
_NO_ID = "000000000"


class BrokenError(Exception):
    """The environment cannot go on: the episode says nothing about the policy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows a turn.

    Attributes:
        said: the turn as a chat message.
        messages: what is answered; none where the episode is over.
        ended_by: why the episode is over: the turn asks for nothing, or the environment says so; None: it goes on.
    """

    said: Message
    messages: tuple[Message, ...] = ()
    ended_by: Literal["turn", "environment"] | None = None


class Figures:
    """Counts of one episode."""

    def __init__(self) -> None:
        self.tool_calls = 0
        self.tool_errors = 0
        self.tool_timeouts = 0
        self.tool_seconds = 0.0

    def count(self, observation: Observation) -> None:
        """Takes in what came of a call."""
        self.tool_calls += 1
        self.tool_errors += observation.kind == "error"
        self.tool_timeouts += observation.kind == "timeout"
        self.tool_seconds += observation.seconds


class Driver(ABC):
    """Of one episode; either a `StatelessDriver` or a `StatefulDriver`.

    Attributes:
        figures: counts so far.
    """

    def __init__(self) -> None:
        self.figures = Figures()

    @abstractmethod
    async def answer(self, turn: Sequence[int], *, last: bool) -> Answer:
        """What follows a turn.

        Args:
            turn: its tokens.
            last: the model gets no further turn: only what changes the episode's reward has to happen.

        Raises:
            BrokenError: it cannot go on.
        """

    async def rewards(self) -> Mapping[str, float] | None:
        """What the episode is worth, by component; None where that is for the reward functions alone to say.

        Raises:
            BrokenError: it cannot say.
        """
        return None

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Lets go of what it holds; never raises."""


class StatelessDriver(Driver):
    """What it answers depends on the turn alone."""

    @abstractmethod
    def recall(self, turn: Sequence[int], between: Sequence[int]) -> Answer:
        """What followed a turn of a draft; nothing happens.

        Args:
            turn: its tokens.
            between: those of its answer.
        """


class StatefulDriver(Driver):
    """An environment: what it answers depends on all turns before."""

    @abstractmethod
    async def begin(self) -> str:
        """The first observation, with which the prompt's last user message goes on.

        Raises:
            BrokenError: it cannot begin.
        """


class ToolTurns:
    """Reads turns that may hold calls of tools, runs these, and words what is answered.

    Args:
        chat: of the model.
        parser: of its calls.
        figures: of the episode.
    """

    def __init__(self, chat: ChatRenderer, parser: Parser, figures: Figures) -> None:
        self._chat = chat
        self._parser = parser
        self._figures = figures

    def read(self, turn: Sequence[int]) -> tuple[Message, tuple[ToolCall | str, ...]]:
        """A turn as a chat message, and its calls; of those that are too many the first alone, which is answered so."""
        parsed = self._parser(self._chat.said(turn))
        return _assistant(parsed), parsed.calls[: _MAX_CALLS + 1]

    async def run(self, toolbox: Toolbox, number: int, call: ToolCall | str) -> Observation:
        """Runs a call and counts what came of it; one that is too many is not run.

        Args:
            toolbox: has the tools.
            number: of the call in its turn, from 0.
            call: as it was read.
        """
        if number < _MAX_CALLS:
            observation = await toolbox.run(call)
        else:
            observation = Observation("Error: too many calls in one turn", "error")
        self._figures.count(observation)
        return observation

    def answered(self, calls: Sequence[ToolCall | str], observed: Sequence[Observation]) -> tuple[Message, ...]:
        """The messages after a turn: the result of each of its calls."""
        return self._messages(calls, [self._chat.observed(observation.text) for observation in observed])

    def recalled(
        self, calls: Sequence[ToolCall | str], turn: Sequence[int], between: Sequence[int]
    ) -> tuple[Message, ...]:
        """The messages after a turn of a draft, by the tokens of both."""
        empty = self._messages(calls, [""] * len(calls))
        return self._messages(calls, self._chat.contents(turn, between, empty))

    def _messages(self, calls: Sequence[ToolCall | str], texts: Sequence[str]) -> tuple[Message, ...]:
        """Templates show names and ids too, which are the model's words."""
        messages = []
        for call, text in zip(calls, texts, strict=True):
            name, call_id = (call.name, call.call_id) if isinstance(call, ToolCall) else ("unknown", "")
            messages.append(
                {
                    "role": "tool",
                    "name": self._chat.harmless(name),
                    "tool_call_id": self._chat.harmless(call_id) or _NO_ID,
                    "content": text,
                }
            )
        return tuple(messages)


class ToolDriver(StatelessDriver):
    """Runs the calls of each turn, all at the same time; a turn without any is the last."""

    def __init__(self, chat: ChatRenderer, parser: Parser, toolbox: Toolbox) -> None:
        super().__init__()
        self._turns = ToolTurns(chat, parser, self.figures)
        self._toolbox = toolbox

    async def answer(self, turn: Sequence[int], *, last: bool) -> Answer:
        said, calls = self._turns.read(turn)
        if not calls:
            return Answer(said, ended_by="turn")
        if last:
            return Answer(said)
        running = (self._turns.run(self._toolbox, number, call) for number, call in enumerate(calls))
        observed = await asyncio.gather(*running)
        return Answer(said, self._turns.answered(calls, observed))

    def recall(self, turn: Sequence[int], between: Sequence[int]) -> Answer:
        said, calls = self._turns.read(turn)
        return Answer(said, self._turns.recalled(calls, turn, between))


def _assistant(parsed: ParsedTurn) -> Message:
    said: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.good:
        said["tool_calls"] = [
            {
                "id": call.call_id or _NO_ID,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in parsed.good
        ]
    return said
