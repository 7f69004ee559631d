"""Tasks of the API `verifiers.v1`: methods marked as rewards and metrics, over a trace of one conversation.

A row's extra_info has the fields of the task's data. A field `answer` that the row lacks is the ground truth. A trace
holds the prompt and the response. Rewards that need the runtime of a rollout cannot be computed here.
Source: verifiers 0.4.0, `verifiers/v1/task.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.adapters.results import failure
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored

_ANSWER = "answer"


class TaskReward:
    """The weighted rewards of a kind of task.

    Args:
        kind: class of the tasks.
        config: of them; None: their own.

    Raises:
        RewardError: it has no reward, or one that needs a runtime.
    """

    wants = ()

    def __init__(self, kind: type[Any], config: Any) -> None:
        self._kind = kind
        self._config = config
        self._api = importlib.import_module("verifiers.v1")
        probe = kind(kind.data_type().model_construct(), config)
        signals = [*probe.hooks("reward"), *(judge.score for judge in probe.plugged_judges())]
        if not signals:
            raise RewardError(f"task {kind.__name__} has no reward", hint="mark a method with @vf.reward")
        for signal in signals:
            parameter = inspect.signature(signal).parameters.get("runtime")
            if parameter is not None and parameter.default is parameter.empty:
                raise RewardError(
                    f"reward {signal.__name__} of task {kind.__name__} needs the runtime of a rollout",
                    hint="run the environment as an agent, or leave this reward out of the task",
                )

    async def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Scores the items, each alone."""
        return await asyncio.gather(*map(self._outcome, items))

    async def _outcome(self, item: RewardItem) -> Outcome:
        try:
            return await self._scored(item)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            return failure(self._kind.__name__, error)

    async def _scored(self, item: RewardItem) -> Scored:
        task = self._kind(self._data(item), self._config)
        trace = self._trace(task, item)
        await task.score(trace)
        components = {name: float(reward.score) for name, reward in trace.rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Scored(float(trace.reward), {**metrics, **components})

    def _data(self, item: RewardItem) -> Any:
        kind = self._kind.data_type()
        fields = {name: value for name, value in item.extra_info.items() if name in kind.model_fields}
        fields.setdefault("prompt", item.extra_info.get("prompt_messages") or item.prompt)
        if _ANSWER in kind.model_fields and item.ground_truth is not None:
            fields.setdefault(_ANSWER, item.ground_truth)
        try:
            return kind.model_validate(fields)
        except ValueError as error:
            raise PayloadError(
                "extra_info", f"no data of {kind.__name__}: {error}", hint="rows need the fields of the task's data"
            ) from error

    def _trace(self, task: Any, item: RewardItem) -> Any:
        api = self._api
        messages = item.extra_info.get("prompt_messages") or [{"role": "user", "content": item.prompt}]
        nodes = [{"message": message} for message in messages]
        nodes.append({"message": {"role": "assistant", "content": item.response}, "sampled": True})
        return api.Trace(
            task=api.TraceTask(type=type(task).__name__, data=task.data),
            agent=api.AgentInfo(config=api.AgentConfig()),
            nodes=[{**node, "parent": place - 1 if place else None} for place, node in enumerate(nodes)],
            is_completed=True,
            ok=True,
        )
