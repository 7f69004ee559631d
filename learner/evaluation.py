"""Evaluation on held-out prompts, beside the training.

A round belongs to one policy version: its tasks are pinned, so that only a generator serving exactly that version
answers them. The tasks are seeded between the announcement of a version and the moment it comes into force. Invariants:
training never waits for a round (the last one of the run excepted); one round runs at a time; a round that nobody can
serve any more, or that takes too long, is withdrawn and begun anew at the next version. A failed response is never
counted as a zero: the mean is over scored ones, and the others are counted beside it.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.client import BufferClient
from learner.data import PromptEncoder, RowSource
from learner.data.prompts import Refused, TaskShape
from learner.groups import is_scored
from mesh.errors import DataError, RollmeshError
from mesh.versions import PolicyVersion
from protos import buffer_pb2, trajectory_pb2

_log = logging.getLogger(__name__)
# How often a round looks whether anybody can still serve it.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One finished round.

    Attributes:
        policy: evaluated version.
        reward: mean over scored responses.
        by_source: the same per data source.
        scored, failed: responses.
        response_length: mean, in tokens.
        seconds: from seeding to the last response.
    """

    policy: PolicyVersion
    reward: float
    by_source: dict[str, float]
    scored: int
    failed: int
    response_length: float
    seconds: float

    def record(self) -> dict[str, Any]:
        """As a metrics record."""
        return {
            "eval/reward": self.reward,
            "eval/version": self.policy.version,
            "eval/scored": self.scored,
            "eval/failed": self.failed,
            "eval/response_length/mean": self.response_length,
            "eval/seconds": self.seconds,
            **{f"eval/reward/{source}": value for source, value in self.by_source.items()},
        }


class _Missed(Exception):  # noqa: N818  # an ordinary end of a round, not a failure
    """Nobody serves the round's version any more."""


def evaluation_tasks(
    source: RowSource, encoder: PromptEncoder, shape: TaskShape, *, rows: int | None
) -> list[trajectory_pb2.PromptTask]:
    """The tasks of a round without ordinals and version: the first `rows` usable rows.

    Raises:
        DataError: no row can be used.
    """
    encoded = [
        encoder.encode(row, shape, task_id=str(row.index), ordinal=0)
        for row in source.rows(range(min(len(source), rows or len(source))))
    ]
    tasks = [task for task in encoded if not isinstance(task, Refused)]
    if len(tasks) < len(encoded):
        _log.warning("%d held-out prompts are left out: empty or too long", len(encoded) - len(tasks))
    if not tasks:
        raise DataError("no held-out prompt can be used", hint="raise rollout.max_prompt_tokens, or see data.eval")
    return tasks


class Evaluator:
    """Runs the rounds.

    Args:
        client: of the buffer.
        tasks: as `evaluation_tasks` gives them.
        incarnation: of this learner.
        timeout_s: longest duration of a round.
        in_force: the version that is in force now.
        on_result: told of every finished round.
    """

    def __init__(
        self,
        client: BufferClient,
        tasks: Sequence[trajectory_pb2.PromptTask],
        *,
        incarnation: int,
        timeout_s: float,
        in_force: Callable[[], PolicyVersion | None],
        on_result: Callable[[EvalResult], None],
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._in_force = in_force
        self._on_result = on_result
        self._round: asyncio.Task[None] | None = None
        self._owed = False
        self.latest: EvalResult | None = None

    @property
    def owed(self) -> bool:
        """A round was missed: the next version should be evaluated instead."""
        return self._owed

    async def begin(self, policy: PolicyVersion) -> bool:
        """Seeds a round for a version that is about to come into force, and collects it in the background.

        Returns:
            False where the round before still runs; then nothing happens.

        Raises:
            FencedError: another learner has taken over.
        """
        if self._round is not None and not self._round.done():
            return False
        began = time.monotonic()
        await self._seed(policy)
        self._owed = False
        self._round = asyncio.create_task(self._run(policy, began), name=f"eval-{policy}")
        return True

    async def last(self, policy: PolicyVersion, attempts: int = 2) -> EvalResult | None:
        """The result at the version in force at the end of the run; None where it cannot be had.

        Waits at most for the round that runs and `attempts` more, each bounded by the round's deadline.
        """
        for _ in range(attempts + 1):
            if self._round is not None:
                await asyncio.gather(self._round, return_exceptions=True)
            if self.latest is not None and self.latest.policy == policy:
                return self.latest
            await self.begin(policy)
        await self.close()
        return None

    async def close(self) -> None:
        """Gives the running round up."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    async def _seed(self, policy: PolicyVersion) -> None:
        """What an earlier round left is withdrawn in the same call."""
        mark = (await self._client.describe("eval")).seeded
        pinned = policy.to_proto()
        tasks = []
        for ordinal, template in enumerate(self._tasks, start=mark + 1):
            task = trajectory_pb2.PromptTask()
            task.CopyFrom(template)
            task.task_id, task.ordinal = f"eval-{policy}-{ordinal}", ordinal
            task.pinned.CopyFrom(pinned)
            tasks.append(task)
        await self._client.seed("eval", self._incarnation, tasks, end_of_data=True, withdraw_pending=True)

    async def _run(self, policy: PolicyVersion, began: float) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                groups = await self._collect(policy)
            result = summarize(policy, groups, asked=self._asked, seconds=time.monotonic() - began)
            await self._settle(policy, groups)
        except (_Missed, TimeoutError) as error:
            why = "took too long" if isinstance(error, TimeoutError) else "found no generator at its version"
            _log.warning("evaluation of version %s %s and is given up", policy, why)
            self._owed = True
            await self._withdraw()
        except RollmeshError as error:
            _log.warning("evaluation of version %s failed: %s", policy, error)
            self._owed = True
        else:
            self.latest = result
            self._on_result(result)

    @property
    def _asked(self) -> int:
        return sum(task.n for task in self._tasks)

    async def _collect(self, policy: PolicyVersion) -> list[buffer_pb2.LeasedGroup]:
        stream = self._client.sample("eval", self._incarnation, with_payloads=False)
        groups: list[buffer_pb2.LeasedGroup] = []
        try:
            stream.request(len(self._tasks), policy.version)
            while len(groups) < len(self._tasks):
                response = await stream.next(_LOOK_S)
                if response is None:
                    await self._look(policy)
                    continue
                groups.extend(arrived.leased for arrived in response.groups)
                if response.exhausted:
                    break
        finally:
            await stream.close()
        return groups

    async def _look(self, policy: PolicyVersion) -> None:
        """Ends the round where its version has passed and tasks are left that nobody has begun."""
        if self._in_force() in (None, policy):
            return
        counts = (await self._client.describe("eval")).counts
        if counts.pending and not counts.generating:
            raise _Missed

    async def _settle(self, policy: PolicyVersion, groups: Sequence[buffer_pb2.LeasedGroup]) -> None:
        leases = [buffer_pb2.LeaseRef(group_id=group.group_id, lease_id=group.lease_id) for group in groups]
        if not leases:
            return
        response = await self._client.claim("eval", self._incarnation, policy.version, leases)
        if not response.claimed:
            _log.warning("%d evaluated groups could not be claimed; they are withdrawn", len(response.refused))
        await self._client.commit("eval", self._incarnation, policy.version + 1)

    async def _withdraw(self) -> None:
        try:
            await self._client.seed("eval", self._incarnation, [], withdraw_pending=True)
        except RollmeshError as error:
            _log.warning("the evaluation round was not withdrawn: %s", error)


def summarize(
    policy: PolicyVersion, groups: Sequence[buffer_pb2.LeasedGroup], *, asked: int, seconds: float
) -> EvalResult:
    """The result of a round.

    Raises:
        RollmeshError: no response was scored.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    lengths: list[int] = []
    for group in groups:
        for member in group.members:
            if is_scored(member):
                rewards[group.task.data_source].append(member.reward)
                lengths.append(member.response_tokens)
    everything = [value for values in rewards.values() for value in values]
    if not everything:
        raise RollmeshError("no held-out response was scored", hint="`rollmesh ledger` says why they failed")
    return EvalResult(
        policy=policy,
        reward=sum(everything) / len(everything),
        by_source={source: sum(values) / len(values) for source, values in sorted(rewards.items())},
        scored=len(everything),
        failed=asked - len(everything),
        response_length=sum(lengths) / len(lengths),
        seconds=seconds,
    )
