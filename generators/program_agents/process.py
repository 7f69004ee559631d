"""Calls of a user's own agents: a function or a command that talks to the endpoint by OpenAI's API.

Invariants: every call of user code ends in an `Outcome` or an `AgentError`. A command, and all that it starts in its
process group, is gone when its call is over. Only the end of its output is kept. The generator's environment may hold
tokens. A command gets the variables of it that it needs to run, and those that the configuration names.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from rollmesh.generators.agents.user_code_executor import OverdueError, UserCodeExecutor
from rollmesh.generators.agents.values import as_number, as_text, cause_of, describe_error
from rollmesh.mesh.errors import ConfigError, RollmeshError
from rollmesh.mesh.runtime.child_processes import start_process
from rollmesh.mesh.user_code import load_callable

# Variables of the generator's environment that a command gets: folders, user and language.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE")
# Bytes of a command's output that are kept of each stream.
_OUTPUT_BYTES = 64 << 10
# Characters of an error that become the episode's failure, and of all that was printed that are logged.
_ERROR_CHARACTERS, _LOGGED_CHARACTERS = 500, 2000
log = logging.getLogger(__name__)
_LINE_END = re.compile(r"[\r\n]+")
# Seconds in which the output of a command is read once it is gone.
_STREAMS_S = 2.0


class AgentError(RollmeshError):
    """A user's agent failed: the episode says nothing about the policy."""

    code = "agent"


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The address under which an agent reaches the model, and its key."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an agent's episode.

    Attributes:
        rewards: by component; None: rewards are left to the run's reward functions.
        answer: its final answer; None: the model's last turn.
    """

    rewards: Mapping[str, float] | None = None
    answer: str | None = None


class Program(Protocol):
    """A user's agent."""

    async def __call__(self, task: Mapping[str, Any], context: LaunchContext, timeout_s: float) -> Outcome:
        """Runs one episode.

        Raises:
            AgentError: it failed, or did not end in time.
        """
        ...

    def close(self) -> None:
        """Ends the processes that it keeps for its calls."""
        ...


def outcome_of(value: Any) -> Outcome:
    """The meaning of an agent's return value: nothing, a reward, rewards by component, or its final answer.

    Raises:
        AgentError: it has none of these forms.
    """
    if value is None:
        return Outcome()
    if isinstance(value, str):
        return Outcome(answer=value)
    if isinstance(value, Mapping):
        scores = dict(value)
        answer = scores.pop("answer", None)
        rewards = {as_text(name): _number(number, as_text(name)) for name, number in scores.items()}
        return Outcome(rewards or None, None if answer is None else as_text(answer))
    return Outcome({"reward": _number(value, "reward")})


def _number(value: Any, name: str) -> float:
    try:
        return as_number(value)
    except ValueError as error:
        raise AgentError(
            f"the agent returned as {name}: {error}",
            hint="return None, a number, a final answer as text, or numbers by name",
        ) from error


class FunctionProgram:
    """A function, plain or async: `agent(task, base_url=..., api_key=..., model=...)`.

    Args:
        path: `module:function` or `file.py:function`.
        at_once: calls of a plain function at the same time; others wait.

    Raises:
        ConfigError: there is no such function, or it does not take these arguments.
    """

    def __init__(self, path: str, at_once: int) -> None:
        self._function = load_callable(path, "rollout.agent.program", ConfigError)
        try:
            inspect.signature(self._function).bind({}, base_url="", api_key="", model="")
        except TypeError as error:
            raise ConfigError(
                f"rollout.agent.program {path}: {error}",
                hint="it is called as agent(task, base_url=..., api_key=..., model=...)",
            ) from error
        # The package's HTTP client writes a line for every call of every agent.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._calls = UserCodeExecutor(at_once)

    async def __call__(self, task: Mapping[str, Any], context: LaunchContext, timeout_s: float) -> Outcome:
        """Runs it.

        Raises:
            AgentError: it raised, returned a value without meaning, or did not end in time.
        """
        arguments = {"base_url": context.base_url, "api_key": context.api_key, "model": context.model}
        try:
            value = await self._calls.call(partial(self._function, task, **arguments), timeout_s=timeout_s)
        except OverdueError as error:
            raise AgentError(f"the agent did not end: {error}") from error
        except Exception as error:  # any error of a user's function becomes one of the agent
            raise AgentError(f"the agent raised {describe_error(error)}") from error
        return outcome_of(value)

    def close(self) -> None:
        """Ends its threads."""
        self._calls.close()


class CommandProgram:
    """A command: the task on its standard input, the model's address in its environment.

    Args:
        command: program and arguments.
        at_once: processes at the same time; others wait.
        pass_env: `rollout.agent.pass_env`.

    Raises:
        ConfigError: there is no such program, or no such variable.
    """

    def __init__(self, command: Sequence[str], at_once: int, pass_env: Sequence[str] = ()) -> None:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"rollout.agent.command: there is no program {command[0]!r}",
                hint=f"it is looked for in PATH, one with a / from {os.getcwd()}, where the generator runs",
            )
        missing = [name for name in pass_env if name not in os.environ]
        if missing:
            raise ConfigError(
                f"rollout.agent.pass_env: the generator's environment has no {', '.join(missing)}",
                hint="set it where the generator is started, or remove it from the list",
            )
        self._environment = {name: os.environ[name] for name in (*_PASSED, *pass_env) if name in os.environ}
        self._command = list(command)
        self._slots = asyncio.Semaphore(at_once)

    async def __call__(self, task: Mapping[str, Any], context: LaunchContext, timeout_s: float) -> Outcome:
        """Runs it; its last line is its outcome, as JSON or as its final answer.

        Raises:
            AgentError: it cannot be started, ended with another code than 0, printed a value without meaning, or did
                not end in time.
        """
        async with self._slots:
            try:
                return await asyncio.wait_for(self._run(task, context), timeout_s)
            except TimeoutError as error:
                raise AgentError(f"the agent did not end within {timeout_s:g} s") from error

    def close(self) -> None:
        """Does nothing: no process is left between calls."""

    async def _run(self, task: Mapping[str, Any], context: LaunchContext) -> Outcome:
        extra = {"OPENAI_BASE_URL": context.base_url, "OPENAI_API_KEY": context.api_key, "OPENAI_MODEL": context.model}
        async with _Tail() as stdout, _Tail() as stderr:
            try:
                process = await start_process(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=stdout.end,
                    stderr=stderr.end,
                    env={**self._environment, **extra},
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentError(f"the agent {self._command[0]} cannot be started: {error.strerror}") from error
            assert process.stdin is not None
            task_read = asyncio.ensure_future(_write_task(process.stdin, json.dumps(task, ensure_ascii=False).encode()))
            stdout.close_end()
            stderr.close_end()
            try:
                code = await process.wait()
            finally:
                # Its children too, which may hold the streams open.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                # Children that have left its process group are not waited for.
                streams = {task_read, stdout.finished, stderr.finished}
                await asyncio.wait(streams, timeout=_STREAMS_S)
                for stream in streams:
                    stream.cancel()
        if code != 0:
            log.warning(
                "an agent ended with code %d; its last words: %s", code, stderr.text.strip()[-_LOGGED_CHARACTERS:]
            )
            cause = cause_of(stderr.text) or cause_of(stdout.text) or "it printed nothing"
            raise AgentError(f"the agent ended with code {code}: {cause[:_ERROR_CHARACTERS]}")
        return parse_last_line(stdout.text)


class _Tail:
    """The end of a process's output, through a pipe that is closed with the context, whatever process holds it.

    Attributes:
        end: for the process to write to.
        finished: done when no process can write any more.
    """

    async def __aenter__(self) -> Self:
        self._kept = b""
        reading, self.end = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(reading, "rb", 0)
        )
        self._open = True
        self.finished = asyncio.ensure_future(self._read(reader))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_end()
        self._transport.close()
        self.finished.cancel()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    def close_end(self) -> None:
        """Closes our copy; the process has its own by now."""
        if self._open:
            self._open = False
            os.close(self.end)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(_OUTPUT_BYTES):
            self._kept = (self._kept + part)[-_OUTPUT_BYTES:]


async def _write_task(stdin: asyncio.StreamWriter, data: bytes) -> None:
    # A command need not read its task.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
    stdin.close()


def parse_last_line(printed: str) -> Outcome:
    """The outcome that a command has printed on its last line: a JSON object, or its final answer as plain text."""
    # `str.splitlines` would also cut an answer that holds U+2028 and the like.
    last = _LINE_END.split(printed.strip())[-1]
    if not last:
        return Outcome()
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    return outcome_of(value) if isinstance(value, dict) else Outcome(answer=last)
