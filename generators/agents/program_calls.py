"""Agents of a user's own, called: a function or a command that talks to the endpoint by OpenAI's API.

Invariants: whatever the user's code does ends in an `Outcome` or an `AgentError`; a command and all that it starts in
its process group is gone when its call is over, and no more of its output is kept than says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from generators.agents.toolbox import told
from generators.agents.user_calls import OverdueError, UserCalls
from mesh.errors import ConfigError, RollmeshError
from mesh.user_code import load_callable

# Of a command's output, in bytes: what is kept of each stream.
_OUTPUT_BYTES = 64 << 10
_ERROR_CHARACTERS = 500


class AgentError(RollmeshError):
    """A user's agent failed: the episode says nothing about the policy."""

    code = "agent"


@dataclass(frozen=True, slots=True)
class Way:
    """How an agent reaches the model."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent says in the end.

    Attributes:
        rewards: by component; None: rewards are left to the run's reward functions.
        answer: its final answer; None: the model's last turn.
    """

    rewards: Mapping[str, float] | None = None
    answer: str | None = None


class Program(Protocol):
    """A user's agent."""

    async def __call__(self, task: Mapping[str, Any], way: Way, timeout_s: float) -> Outcome:
        """Runs one episode.

        Raises:
            AgentError: it failed, or did not end in time.
        """
        ...

    def close(self) -> None:
        """Ends what it keeps for its calls."""
        ...


def outcome_of(value: Any) -> Outcome:
    """What an agent's return value means: nothing, a reward, rewards by component, or its final answer.

    Raises:
        AgentError: it is none of them.
    """
    if value is None:
        return Outcome()
    if isinstance(value, str):
        return Outcome(answer=value)
    if isinstance(value, Mapping):
        found = dict(value)
        answer = found.pop("answer", None)
        rewards = {str(name): _number(number, str(name)) for name, number in found.items()}
        return Outcome(rewards or None, None if answer is None else str(answer))
    return Outcome({"reward": _number(value, "reward")})


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise AgentError(
            f"the agent returned {value!r} as {name}",
            hint="return None, a number, a final answer as text, or numbers by name",
        ) from error
    if not math.isfinite(number):
        raise AgentError(f"the agent returned {number} as {name}", hint="a reward is a finite number")
    return number


class FunctionProgram:
    """A function, plain or async: `agent(task, base_url=..., api_key=..., model=...)`.

    Args:
        path: `module:function` or `file.py:function`.
        at_once: calls of a plain function at the same time; others wait.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, path: str, at_once: int) -> None:
        self._function = load_callable(path, "rollout.agent.program", ConfigError)
        # The package's HTTP client writes a line for every call of every agent.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._calls = UserCalls(at_once)

    async def __call__(self, task: Mapping[str, Any], way: Way, timeout_s: float) -> Outcome:
        """Runs it.

        Raises:
            AgentError: it raised, returned what has no meaning, or did not end in time.
        """
        arguments = {"base_url": way.base_url, "api_key": way.api_key, "model": way.model}
        try:
            value = await self._calls.call(partial(self._function, task, **arguments), timeout_s=timeout_s)
        except OverdueError as error:
            raise AgentError(f"the agent did not end: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise AgentError(f"the agent raised {told(error)}") from error
        return outcome_of(value)

    def close(self) -> None:
        """Ends its threads."""
        self._calls.close()


class CommandProgram:
    """A command: the task on its standard input, the way to the model in its environment.

    Args:
        command: program and arguments.
        at_once: processes at the same time; others wait.
    """

    def __init__(self, command: Sequence[str], at_once: int) -> None:
        self._command = list(command)
        self._turn = asyncio.Semaphore(at_once)

    async def __call__(self, task: Mapping[str, Any], way: Way, timeout_s: float) -> Outcome:
        """Runs it; what it printed last is its outcome, as JSON or as its final answer.

        Raises:
            AgentError: it cannot be started, ended with another code than 0, printed what has no meaning, or did not
                end in time.
        """
        async with self._turn:
            try:
                return await asyncio.wait_for(self._run(task, way), timeout_s)
            except TimeoutError as error:
                raise AgentError(f"the agent did not end within {timeout_s:g} s") from error

    def close(self) -> None:
        """Nothing is left between calls."""

    async def _run(self, task: Mapping[str, Any], way: Way) -> Outcome:
        found = {"OPENAI_BASE_URL": way.base_url, "OPENAI_API_KEY": way.api_key, "OPENAI_MODEL": way.model}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **found},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"the agent {self._command[0]} cannot be started: {error.strerror}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        streams = asyncio.gather(
            _hand_over(process.stdin, json.dumps(task, ensure_ascii=False).encode()),
            _tail(process.stdout),
            _tail(process.stderr),
        )
        try:
            code = await process.wait()
        finally:
            # Also what it has left behind, which may hold the streams open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            _, printed, said = await streams
        if code != 0:
            raise AgentError(f"the agent ended with code {code}: {said.strip()[-_ERROR_CHARACTERS:]}")
        return _of_last_line(printed)


async def _hand_over(stdin: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read its task.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(_OUTPUT_BYTES):
        kept = (kept + part)[-_OUTPUT_BYTES:]
    return kept.decode(errors="replace")


def _of_last_line(printed: str) -> Outcome:
    lines = printed.strip().splitlines()
    if not lines:
        return Outcome()
    try:
        value = json.loads(lines[-1])
    except json.JSONDecodeError:
        value = None
    return outcome_of(value) if isinstance(value, dict) else Outcome(answer=lines[-1])
