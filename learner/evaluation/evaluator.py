"""Evaluation on held-out prompts, concurrently with the training.

A round belongs to one policy version: its tasks are pinned, so that only a generator serving exactly that version
answers them. The tasks are seeded between the announcement of a version and the moment it comes into force.

Invariants:
- training never waits for a round, except for the last one of the run;
- one round runs at a time; one that comes due meanwhile is skipped, counted and logged;
- a round that no generator can serve any more, or that takes too long, is withdrawn and retried at the next version;
- a result is stored before it is announced.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rollmesh.buffer.client.client import BufferClient, ReceivedGroup, SampleStream
from rollmesh.learner.data.prompts import PromptEncoder, RefusedRow, TaskShape
from rollmesh.learner.data.records import RowSource
from rollmesh.learner.data.rows import Row
from rollmesh.learner.evaluation.eval_table import EvalTable
from rollmesh.learner.evaluation.result import Decode, EvalResult, summarize
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import DataError, RollmeshError
from rollmesh.mesh.tables import EVAL
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)
# Seconds between a round's checks that some generator can still serve it.
_CHECK_S = 0.5


class _NotServedError(Exception):
    """No generator can serve the round's version any more: an ordinary end of a round."""


def evaluation_tasks(
    source: RowSource[Row], encoder: PromptEncoder, shape: TaskShape, *, rows: Sequence[int]
) -> list[trajectory_pb2.PromptTask]:
    """The tasks of a round without ordinals and version: those of all rows that can be used.

    Args:
        source: of the rows.
        encoder: makes tasks of them.
        shape: of the tasks.
        rows: numbers of the rows that are asked.

    Raises:
        DataError: no row can be used.
    """
    encoded = [
        encoder.encode(row, shape, number=number, task_id=str(number), ordinal=0)
        for number, row in zip(rows, source.rows(rows), strict=True)
    ]
    tasks = [task for task in encoded if not isinstance(task, RefusedRow)]
    if len(tasks) < len(encoded):
        log.warning("%d held-out prompts are left out: empty or too long", len(encoded) - len(tasks))
    if not tasks:
        raise DataError("no held-out prompt can be used", hint="raise rollout.max_prompt_tokens, or see data.eval")
    return tasks


@dataclass(frozen=True, slots=True)
class RoundRules:
    """Settings of the rounds.

    Attributes:
        incarnation: of this learner.
        timeout_s: longest duration of a round.
        right_at: reward from which a response is right.
        measured_by: see `EvalResult`.
    """

    incarnation: int
    timeout_s: float
    right_at: float
    measured_by: str


class RoundListener(Protocol):
    """Receives the outcome of a round. A finished one is stored before it is announced."""

    def store_result(self, result: EvalResult) -> None:
        """Stores a finished round; called in a thread of its own."""
        ...

    def round_finished(self, result: EvalResult) -> None:
        """Announces a finished round."""
        ...

    def round_abandoned(self, policy: PolicyVersion) -> None:
        """Handles a round that was given up; called in a thread of its own."""
        ...


class Evaluator:
    """Runs the rounds.

    Args:
        client: of the buffer.
        tasks: as `evaluation_tasks` gives them.
        rules: of all rounds.
        decode: token ids to text.
        status: says which version is in force.
        listener: receives the outcome of every round.

    Attributes:
        latest: the last result; None before the first.
        policy: the version of the current or last round.
        skipped: rounds left out because the one before still ran.
    """

    def __init__(
        self,
        client: BufferClient,
        tasks: Sequence[trajectory_pb2.PromptTask],
        rules: RoundRules,
        decode: Decode,
        status: LearnerStatus,
        listener: RoundListener,
    ) -> None:
        self._client = client
        self._table = EvalTable(client, rules.incarnation)
        self._tasks = tasks
        self._rules = rules
        self._decode = decode
        self._status = status
        self._listener = listener
        self._round: asyncio.Task[None] | None = None
        self._retry_due = False
        self._answered = 0
        self.latest: EvalResult | None = None
        self.policy: PolicyVersion | None = None
        self.skipped = 0

    @property
    def retry_due(self) -> bool:
        """True where a round was missed, so that the next version should be evaluated instead."""
        return self._retry_due

    @property
    def is_running(self) -> bool:
        """True while a round is being answered; may be asked by any thread."""
        return self._round is not None and not self._round.done()

    async def start_round(self, policy: PolicyVersion) -> bool:
        """Seeds a round for the version in force, and collects it in the background; see `seed_round`."""
        seeded = await self.seed_round(policy)
        if seeded:
            self.collect_round(policy)
        return seeded

    async def seed_round(self, policy: PolicyVersion) -> bool:
        """Seeds a round for a version that is about to be published.

        Returns:
            Whether it is seeded. If a round still runs, this version's is left out.

        Raises:
            FencedError: another learner has taken over.
        """
        if self.is_running:
            if policy != self.policy:
                self._skip(policy)
            return False
        await self._table.seed(policy, self._tasks, end_of_data=True, withdraw_pending=True)
        self._retry_due = False
        self.policy = policy
        return True

    def collect_round(self, policy: PolicyVersion) -> None:
        """Collects the round that was seeded, in the background, once its version can be served."""
        self._round = asyncio.create_task(self._run(policy, time.monotonic()), name=f"eval-{policy}")

    def _skip(self, policy: PolicyVersion) -> None:
        self.skipped += 1
        if self.skipped == 1:
            log.warning(
                "evaluation of version %s is left out, because that of version %s still runs: rounds come due faster "
                "than they end; raise eval.every_steps, or lower eval.rows (further ones are counted as eval/skipped)",
                policy,
                self.policy,
            )

    async def final_result(self, policy: PolicyVersion, attempts: int = 2) -> EvalResult | None:
        """The result at the version in force at the end of the run; None where it cannot be had.

        Waits at most for the round that runs and `attempts` more, each bounded by the round's deadline.
        """
        for _ in range(attempts + 1):
            if self._round is not None:
                await asyncio.gather(self._round, return_exceptions=True)
            if self.latest is not None and self.latest.policy == policy:
                return self.latest
            await self.start_round(policy)
        await self.close()
        return None

    async def close(self) -> None:
        """Abandons the running round.

        Raises:
            FencedError: another learner has taken over.
        """
        if self._round is None or self.policy is None or self._round.done():
            return
        self._round.cancel()
        await asyncio.gather(self._round, return_exceptions=True)
        await asyncio.to_thread(self._listener.round_abandoned, self.policy)

    async def _run(self, policy: PolicyVersion, began: float) -> None:
        try:
            result = await self._result(policy, began)
            await asyncio.to_thread(self._listener.store_result, result)
        except (_NotServedError, TimeoutError) as error:
            why = "found no generator at its version" if isinstance(error, _NotServedError) else self._overdue()
            log.warning("evaluation of version %s is given up: it %s", policy, why)
            self._retry_due = True
            await self._table.withdraw()
            await asyncio.to_thread(self._listener.round_abandoned, policy)
        except RollmeshError as error:
            log.warning("evaluation of version %s failed: %s", policy, error)
            self._retry_due = True
            await asyncio.to_thread(self._listener.round_abandoned, policy)
        else:
            self.latest = result
            self._listener.round_finished(result)

    def _overdue(self) -> str:
        return (
            f"took more than {self._rules.timeout_s:g} s (eval.timeout_s), "
            f"in which {self._answered} of {len(self._tasks)} prompts were answered and scored"
        )

    async def _result(self, policy: PolicyVersion, began: float) -> EvalResult:
        """Collects a round, summarizes it, and commits its groups, which stay leased until then."""
        stream = self._client.sample(EVAL, self._rules.incarnation)
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                arrived = await self._collect(stream, policy)
            seconds = time.monotonic() - began
            result = await asyncio.to_thread(
                summarize,
                policy,
                arrived,
                self._decode,
                asked=self._tasks,
                seconds=seconds,
                right_at=self._rules.right_at,
            )
            await self._table.commit(policy, [group.leased for group in arrived])
        finally:
            await stream.close()
        return replace(result, skipped=self.skipped, measured_by=self._rules.measured_by)

    async def _collect(self, stream: SampleStream, policy: PolicyVersion) -> list[ReceivedGroup]:
        """The groups of a round, each once; for one that arrives again, the later lease counts."""
        groups: dict[str, ReceivedGroup] = {}
        self._answered = 0
        stream.holdings = lambda: [group.lease for group in groups.values()]
        while (missing := len(self._tasks) - len(groups)) > 0:
            if (unasked := missing - stream.outstanding(policy.version)) > 0:
                stream.request(unasked, policy.version)
            response = await stream.next(_CHECK_S)
            if response is None:
                await self._check_served(policy)
                continue
            for lost in response.lost:
                if lost.group_id in groups and groups[lost.group_id].lease == (lost.group_id, lost.lease_id):
                    del groups[lost.group_id]
            groups.update((group.leased.group_id, group) for group in response.groups)
            self._answered = len(groups)
            if response.exhausted:
                break
        return list(groups.values())

    async def _check_served(self, policy: PolicyVersion) -> None:
        """Ends the round where its version has passed and tasks are left that no generator has, or has given back."""
        if self._status.published in (None, policy):
            return
        described = await self._client.describe(EVAL)
        counts, unheld = described.counts, described.unheld
        if counts.pending + unheld and counts.generating == unheld:
            raise _NotServedError
