"""Drivers answer the model's turns in an episode: the two kinds of them, and the one of tools without an environment.

Invariants: an environment that breaks raises `BrokenError`, which ends the episode as an error; a tool that breaks is
an observation. The answers of a stateless driver are read from a draft; a stateful driver is taken through a draft's
turns again.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollmesh.generators.agents.chat_template import ChatRenderer, Message
from rollmesh.generators.agents.tool_call_parsers import Parser
from rollmesh.generators.agents.tool_calls import ParsedTurn, ToolCall
from rollmesh.generators.agents.toolbox import Observation, Toolbox
from rollmesh.mesh.chat.thoughts import thoughts_at_end

# Calls of one turn that are run; further ones are answered with an error.
_MAX_CALLS = 16
_NO_ID = "000000000"


class BrokenError(Exception):
    """The environment cannot continue: the episode says nothing about the policy."""


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """The answer to a turn.

    Attributes:
        assistant: the turn as a chat message.
        messages: the answer; empty where the episode is over.
        ended_by: the reason for the end: the turn calls no tool, or the environment ended it; None: it continues.
    """

    assistant: Message
    messages: tuple[Message, ...] = ()
    ended_by: Literal["turn", "environment"] | None = None


class ToolCounts:
    """Counts of one episode's tool calls.

    Attributes:
        ended: each call's end as Unix time in nanoseconds, its seconds, and the kind of its outcome.
    """

    def __init__(self) -> None:
        self.tool_calls = 0
        self.tool_errors = 0
        self.tool_timeouts = 0
        self.tool_seconds = 0.0
        self.ended: list[tuple[int, float, str]] = []

    def count(self, observation: Observation) -> None:
        """Counts the outcome of a call."""
        self.tool_calls += 1
        self.tool_errors += observation.kind == "error"
        self.tool_timeouts += observation.kind == "timeout"
        self.tool_seconds += observation.seconds
        self.ended.append((time.time_ns(), observation.seconds, observation.kind))


class Driver(ABC):
    """Answers the turns of one episode; either a `StatelessDriver` or a `StatefulDriver`.

    Attributes:
        counts: counts so far.
    """

    def __init__(self) -> None:
        self.counts = ToolCounts()

    @abstractmethod
    async def answer(self, turn: Sequence[int], *, last: bool) -> DriverAnswer:
        """The answer to a turn.

        Args:
            turn: its tokens.
            last: the model gets no further turn: only actions that change the episode's reward have to happen.

        Raises:
            BrokenError: it cannot continue.
        """

    async def rewards(self) -> Mapping[str, float] | None:
        """Rewards of the episode, by component; None where the reward functions alone decide.

        Raises:
            BrokenError: it cannot say.
        """
        return None

    def step_rewards(self) -> Sequence[float]:
        """Those that add up to `rewards`, one for each answer; empty where there are none."""
        return ()

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases its resources; never raises."""


class StatelessDriver(Driver):
    """A driver with answers that depend on the turn alone."""

    @abstractmethod
    def recall(self, turn: Sequence[int], between: Sequence[int]) -> DriverAnswer:
        """Reads the answer to a turn from a draft; no tool runs.

        Args:
            turn: its tokens.
            between: those of its answer.
        """


class StatefulDriver(Driver):
    """An environment: its answer depends on all turns before."""

    @abstractmethod
    async def begin(self) -> str:
        """Begins; returns the first observation, which continues the prompt's last user message.

        Raises:
            BrokenError: it cannot begin.
        """


class ToolTurns:
    """Reads turns that may hold calls of tools, runs these, and writes the answer.

    Args:
        chat: of the model.
        parser: of its calls.
        counts: of the episode.
    """

    def __init__(self, chat: ChatRenderer, parser: Parser, counts: ToolCounts) -> None:
        self._chat = chat
        self._parser = parser
        self._counts = counts
        self._opened = chat.opens_thoughts
        # Some templates open thoughts after a user's message, and none after the result of a tool.
        result = {"role": "tool", "name": "f", "tool_call_id": _NO_ID, "content": ""}
        self._opened_after_results = bool(thoughts_at_end(chat.text_after_turn([result])))

    def read(self, turn: Sequence[int], toolbox: Toolbox) -> tuple[Message, tuple[ToolCall | str, ...]]:
        """A turn as a chat message, and its calls; of surplus calls only the first, which is answered with an error.

        Turns are read in order: the first follows a message of the user, the others results.

        Args:
            turn: its tokens.
            toolbox: has the tools.
        """
        parsed = self._parser(self._chat.decode_turn(turn), opened=self._opened, names=toolbox.names)
        self._opened = self._opened_after_results
        return _assistant(parsed), parsed.calls[: _MAX_CALLS + 1]

    async def run(self, toolbox: Toolbox, number: int, call: ToolCall | str) -> Observation:
        """Runs a call and counts its outcome; a surplus call is not run.

        Args:
            toolbox: has the tools.
            number: of the call in its turn, from 0.
            call: as it was read.
        """
        if number < _MAX_CALLS:
            observation = await toolbox.run(call)
        else:
            observation = Observation("Error: too many calls in one turn", "error")
        self._counts.count(observation)
        return observation

    def tool_messages(self, calls: Sequence[ToolCall | str], observed: Sequence[Observation]) -> tuple[Message, ...]:
        """The messages after a turn: the result of each of its calls."""
        return self._messages(calls, [self._chat.render_observation(observation.text) for observation in observed])

    def recalled_tool_messages(
        self, calls: Sequence[ToolCall | str], turn: Sequence[int], between: Sequence[int]
    ) -> tuple[Message, ...]:
        """The messages after a turn of a draft, by the tokens of both."""
        empty = self._messages(calls, [""] * len(calls))
        return self._messages(calls, self._chat.recover_contents(turn, between, empty))

    def _messages(self, calls: Sequence[ToolCall | str], texts: Sequence[str]) -> tuple[Message, ...]:
        """Builds the messages; templates show names and ids too, which are the model's words."""
        messages = []
        for call, text in zip(calls, texts, strict=True):
            name, call_id = (call.name, call.call_id) if isinstance(call, ToolCall) else ("unknown", "")
            messages.append(
                {
                    "role": "tool",
                    "name": self._chat.escape_special_tokens(name),
                    "tool_call_id": self._chat.escape_special_tokens(call_id) or _NO_ID,
                    "content": text,
                }
            )
        return tuple(messages)


class ToolDriver(StatelessDriver):
    """Runs the calls of each turn, all at the same time; a turn without any is the last."""

    def __init__(self, chat: ChatRenderer, parser: Parser, toolbox: Toolbox) -> None:
        super().__init__()
        self._turns = ToolTurns(chat, parser, self.counts)
        self._toolbox = toolbox

    async def answer(self, turn: Sequence[int], *, last: bool) -> DriverAnswer:
        message, calls = self._turns.read(turn, self._toolbox)
        if not calls:
            return DriverAnswer(message, ended_by="turn")
        if last:
            return DriverAnswer(message)
        running = (self._turns.run(self._toolbox, number, call) for number, call in enumerate(calls))
        observed = await asyncio.gather(*running)
        return DriverAnswer(message, self._turns.tool_messages(calls, observed))

    def recall(self, turn: Sequence[int], between: Sequence[int]) -> DriverAnswer:
        message, calls = self._turns.read(turn, self._toolbox)
        return DriverAnswer(message, self._turns.recalled_tool_messages(calls, turn, between))


def _assistant(parsed: ParsedTurn) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.valid:
        message["tool_calls"] = [
            {
                "id": call.call_id or _NO_ID,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in parsed.valid
        ]
    return message
