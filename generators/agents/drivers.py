"""What drives an episode between the model's turns; here, tools.

Invariant: an environment that breaks raises `BrokenError`, which ends the episode as an error; a tool that breaks is an
observation.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generators.agents.calls import ParsedTurn, ToolCall
from generators.agents.chat import Chat, Message
from generators.agents.parsers import Parser
from generators.agents.toolbox import Observation, Toolbox

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
        done: the episode is over.
    """

    said: Message
    messages: tuple[Message, ...] = ()
    done: bool = False


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
    """Of one episode.

    Attributes:
        figures: counts so far.
        stateful: what it answers depends on all turns before: a draft is gone on from by taking these turns again.
        opens: the prompt ends within its last user message, for a first observation.
    """

    stateful = False
    opens = False

    def __init__(self) -> None:
        self.figures = Figures()

    async def begin(self) -> str:
        """The first observation; empty where there is none.

        Raises:
            BrokenError: it cannot begin.
        """
        return ""

    @abstractmethod
    async def answer(self, turn: Sequence[int], *, last: bool) -> Answer:
        """What follows a turn.

        Args:
            turn: its tokens.
            last: the model gets no further turn: only what changes the episode's reward has to happen.

        Raises:
            BrokenError: it cannot go on.
        """

    def recall(self, turn: Sequence[int], between: Sequence[int]) -> Answer:
        """What followed a turn of a draft, by its tokens; nothing happens. Never asked of what is stateful."""
        raise NotImplementedError(f"{len(turn)} and {len(between)} tokens of a draft")

    async def rewards(self) -> Mapping[str, float] | None:
        """What the episode is worth, by component; None where that is for the reward functions alone to say.

        Raises:
            BrokenError: it cannot say.
        """
        return None

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Lets go of what it holds; never raises."""


class ToolDriver(Driver):
    """Runs the calls of each turn; a turn without any is the last."""

    def __init__(self, chat: Chat, parser: Parser, toolbox: Toolbox | None) -> None:
        super().__init__()
        self._chat = chat
        self._parser = parser
        self._toolbox = toolbox

    async def answer(self, turn: Sequence[int], *, last: bool) -> Answer:
        parsed = self._parser(self._chat.said(turn))
        said = _assistant(parsed)
        if not parsed.calls:
            return Answer(said, done=True)
        if last and not self.stateful:
            return Answer(said)
        calls = parsed.calls[:_MAX_CALLS]
        if self.stateful:
            observations = [await self._run(call) for call in calls]
        else:
            observations = list(await asyncio.gather(*map(self._run, calls)))
        observations += [Observation("Error: too many calls in one turn", "error")] * (len(parsed.calls) - len(calls))
        for observation in observations:
            self.figures.count(observation)
        texts = [self._chat.observed(observation.text) for observation in observations]
        return Answer(said, self._tool_messages(parsed.calls, texts))

    def recall(self, turn: Sequence[int], between: Sequence[int]) -> Answer:
        parsed = self._parser(self._chat.said(turn))
        empty = self._tool_messages(parsed.calls, [""] * len(parsed.calls))
        return Answer(_assistant(parsed), self._tool_messages(parsed.calls, self._chat.contents(turn, between, empty)))

    async def _run(self, call: ToolCall | str) -> Observation:
        assert self._toolbox is not None, "begun before"
        return await self._toolbox.run(call)

    def _tool_messages(self, calls: Sequence[ToolCall | str], texts: Sequence[str]) -> tuple[Message, ...]:
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
