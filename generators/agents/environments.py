"""Episodes driven by an environment, in either form (`mesh.agent_tools`).

Invariant: any error or time-out of an environment ends its episode as an error: `BrokenError`. Tool methods of TRL's
form may raise: the model sees the error.
"""

from __future__ import annotations

import inspect
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollmesh.generators.agents.chat_template import ChatRenderer
from rollmesh.generators.agents.drivers import BrokenError, DriverAnswer, StatefulDriver, ToolTurns
from rollmesh.generators.agents.tool_call_parsers import Parser
from rollmesh.generators.agents.toolbox import Toolbox
from rollmesh.generators.agents.user_code_executor import OverdueError, UserCodeExecutor
from rollmesh.generators.agents.values import as_number, as_text, describe_error
from rollmesh.mesh.agent_tools import EnvironmentSource
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)


class Environments:
    """Makes environments and calls them.

    Args:
        source: where they come from.
        user_calls: runs them.
        timeout_s: of one call.
    """

    def __init__(self, source: EnvironmentSource, user_calls: UserCodeExecutor, *, timeout_s: float) -> None:
        self.source = source
        self._user_calls = user_calls
        self._timeout_s = timeout_s

    async def begin(self, task: trajectory_pb2.PromptTask) -> tuple[Any, str]:
        """Makes a new environment; returns it and the observation of its `reset`.

        Raises:
            BrokenError: it could not be made or reset.
        """
        environment = await self.call("making it", self.source.make)
        try:
            reset = environment.reset
            observation = await self.call("reset", partial(reset, **_accepted_columns(reset, row_of(task))))
        except BaseException:
            # It has no other owner yet.
            await self.close(environment)
            raise
        if isinstance(observation, tuple):  # Gymnasium's (observation, info)
            observation = observation[0]
        return environment, "" if observation is None else as_text(observation)

    async def call(self, method: str, function: Callable[[], Any]) -> Any:
        """Calls one of its methods, arguments bound.

        Raises:
            BrokenError: it raised, or took too long.
        """
        try:
            return await self._user_calls.call(function, timeout_s=self._timeout_s)
        except OverdueError as error:
            raise BrokenError(f"environment {self.source.path}: {method}: {error}") from error
        except Exception as error:  # any error of a user's environment is its end
            raise BrokenError(f"environment {self.source.path}: {method}: {describe_error(error)}") from error

    async def close(self, environment: Any) -> None:
        """Calls its `close`, where it has one that is no tool."""
        close = getattr(environment, "close", None)
        if not callable(close) or "close" in self.source.tool_names:
            return
        try:
            await self.call("close", close)
        except BrokenError as error:
            log.warning("%s", error)


class _EnvironmentDriver(StatefulDriver):
    """The driver of an episode with an environment of its own."""

    def __init__(self, chat: ChatRenderer, environments: Environments, task: trajectory_pb2.PromptTask) -> None:
        super().__init__()
        self._chat = chat
        self._environments = environments
        self._task = task
        self._environment: Any = None

    async def begin(self) -> str:
        self._environment, observation = await self._environments.begin(self._task)
        return self._chat.render_observation(observation)

    async def close(self) -> None:
        if self._environment is not None:
            await self._environments.close(self._environment)


class StepDriver(_EnvironmentDriver):
    """An environment to which every turn of the model is an action."""

    def __init__(self, chat: ChatRenderer, environments: Environments, task: trajectory_pb2.PromptTask) -> None:
        super().__init__(chat, environments, task)
        self._steps: list[float] = []

    async def answer(self, turn: Sequence[int], *, last: bool) -> DriverAnswer:
        del last  # the reward of the last action counts as well
        text = self._chat.plain_text(turn)
        stepped = await self._environments.call("step", partial(self._environment.step, text))
        observation, reward, done = _step(self._environments.source.path, stepped)
        self._steps.append(reward)
        message = {"role": "assistant", "content": text}
        if done:
            return DriverAnswer(message, ended_by="environment")
        return DriverAnswer(message, ({"role": "user", "content": self._chat.render_observation(observation)},))

    async def rewards(self) -> Mapping[str, float]:
        reward = getattr(self._environment, "reward", None)
        if reward is None:
            return {"environment": sum(self._steps, 0.0)}
        if callable(reward):
            reward = await self._environments.call("reward", reward)
        return _rewards(self._environments.source.path, reward)

    def step_rewards(self) -> Sequence[float]:
        return self._steps if getattr(self._environment, "reward", None) is None else ()


class ToolEnvironmentDriver(_EnvironmentDriver):
    """An environment in TRL's form: its public methods are tools, and its state is its reward.

    The calls of a turn are run one after the other, for each may depend on what those before it have changed.
    """

    def __init__(
        self,
        chat: ChatRenderer,
        parser: Parser,
        environments: Environments,
        task: trajectory_pb2.PromptTask,
        make_toolbox: Callable[[Any], Toolbox],
    ) -> None:
        super().__init__(chat, environments, task)
        self._turns = ToolTurns(chat, parser, self.counts)
        self._make_toolbox = make_toolbox
        self._toolbox: Toolbox | None = None

    async def begin(self) -> str:
        observation = await super().begin()
        self._toolbox = self._make_toolbox(self._environment)
        return observation

    async def answer(self, turn: Sequence[int], *, last: bool) -> DriverAnswer:
        del last  # a call may change the reward
        assert self._toolbox is not None, "begun before"
        message, calls = self._turns.read(turn, self._toolbox)
        if not calls:
            return DriverAnswer(message, ended_by="turn")
        observed = []
        for number, call in enumerate(calls):
            observed.append(await self._turns.run(self._toolbox, number, call))
            if observed[-1].kind == "timeout":
                # Its method may continue, and change it under the next one.
                raise BrokenError(f"environment {self._environments.source.path}: a method did not end in time")
        return DriverAnswer(message, self._turns.tool_messages(calls, observed))

    async def rewards(self) -> Mapping[str, float] | None:
        path = self._environments.source.path
        get_reward = getattr(self._environment, "get_reward", None)
        if callable(get_reward):
            return _rewards(path, await self._environments.call("get_reward", get_reward))
        reward = getattr(self._environment, "reward", None)
        return None if reward is None or callable(reward) else _rewards(path, reward)


def row_of(task: trajectory_pb2.PromptTask) -> dict[str, Any]:
    """The columns of a task's row, by name, with those of `extra_info` in addition, and a seed of the row."""
    extra = json.loads(task.extra_info_json) if task.extra_info_json else {}
    truth = json.loads(task.ground_truth_json) if task.ground_truth_json else None
    columns = {
        "prompt": json.loads(task.messages_json) if task.messages_json else task.prompt_text,
        "data_source": task.data_source,
        "reward_model": {"ground_truth": truth},
        "ground_truth": truth,
        "extra_info": extra,
        "seed": zlib.crc32(f"{task.data_source}:{task.row}".encode()),
    }
    return {**columns, **(extra if isinstance(extra, dict) else {})}


def _accepted_columns(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


def _step(path: str, stepped: Any) -> tuple[str, float, bool]:
    """(observation, reward, done), also from Gymnasium's (observation, reward, terminated, truncated, info)."""
    if not isinstance(stepped, tuple) or len(stepped) not in (3, 5):
        raise BrokenError(
            f"environment {path}: step returned {type(stepped).__name__}, not (observation, reward, done) or "
            "Gymnasium's five"
        )
    observation, reward = stepped[:2]
    try:
        done = bool(stepped[2]) or (len(stepped) == 5 and bool(stepped[3]))
    except Exception as error:  # an array of several, say
        raise BrokenError(f"environment {path}: step: what says whether it is over is no truth value") from error
    return "" if observation is None else as_text(observation), _number(path, "step", reward), done


def _rewards(path: str, reward: Any) -> dict[str, float]:
    if isinstance(reward, Mapping):
        return {str(name): _number(path, "reward", value) for name, value in reward.items()}
    return {"environment": _number(path, "reward", reward)}


def _number(path: str, method: str, value: Any) -> float:
    try:
        return as_number(value)
    except ValueError as error:
        raise BrokenError(f"environment {path}: {method} gave {error}") from error
