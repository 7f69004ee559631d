"""Publication of versions in the one right order: weights fetchable, evaluation seeded, version in force.

Invariants: a version comes into force only when its weights can be fetched. Announcements never overtake one another,
because each waits for the one before; neither do commits. Training continues during an announcement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.runtime import LearnerRuntime
from rollmesh.learner.evaluation.evaluator import Evaluator
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.mesh.config import Config
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AnnouncementRules:
    """Settings of announcements and evaluations.

    Attributes:
        incarnation: of this learner.
        wire_dtype: dtype in which weights travel.
        commit_each: every step counts as trained at once (`commit: step`).
        timeout_s: deadline of one announcement.
        evaluate_first: version that is evaluated whatever `evaluate_every` is; None: no such version.
        evaluate_every: versions from one evaluation to the next; None: only the first and the last.
    """

    incarnation: int
    wire_dtype: str
    commit_each: bool
    timeout_s: float
    evaluate_first: int | None
    evaluate_every: int | None

    @classmethod
    def of(cls, config: Config, progress: RunProgress, timeout_s: float) -> AnnouncementRules:
        """The rules of a run that a learner continues; a run without a result begins with an evaluation."""
        return cls(
            incarnation=progress.incarnation,
            wire_dtype=config.model.dtype,
            commit_each=config.buffer.commit == "step",
            timeout_s=timeout_s,
            evaluate_first=None if progress.totals.evals else progress.resumed_at,
            evaluate_every=config.eval.every_steps,
        )

    def evaluates(self, version: int) -> bool:
        """True where a version is due for evaluation."""
        every = self.evaluate_every
        return version == self.evaluate_first or (every is not None and version > 0 and version % every == 0)


class VersionAnnouncer:
    """Publishes the versions of one learner.

    Args:
        runtime: of rank 0.
        client: of the buffer.
        publisher: holds the weights.
        evaluator: None without held-out data.
        rules: of the run.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        client: BufferClient,
        publisher: WeightPublisher,
        evaluator: Evaluator | None,
        rules: AnnouncementRules,
    ) -> None:
        self._bridge = runtime.bridge
        self._status = runtime.status
        self._client = client
        self._publisher = publisher
        self._evaluator = evaluator
        self._rules = rules
        self._committing = asyncio.Lock()
        self._running: Future[None] | None = None
        self._evaluating: PolicyVersion | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Makes the weights fetchable and starts to announce them; raises errors of the announcement before.

        Raises:
            FencedError: another learner has taken over.
            WeightsError: the weights could not be stored.
        """
        self.wait_in_force()
        policy = PolicyVersion(self._rules.incarnation, version)
        self._publisher.publish(policy, tensors, self._rules.wire_dtype)
        self._status.published = policy
        due = self._evaluator is not None and (self._evaluator.retry_due or self._rules.evaluates(version))
        self._evaluating = policy if due else None
        self._running = self._bridge.submit(self._announce(policy))

    def is_evaluated(self, version: int) -> bool:
        """True where `version`, the last one, is or was evaluated; waits until it is in force if it is due.

        Raises:
            RollmeshError: the announcement failed.
        """
        policy = PolicyVersion(self._rules.incarnation, version)
        if self._evaluating == policy:
            self.wait_in_force()
        return self._evaluator is not None and self._evaluator.policy == policy

    def wait_in_force(self) -> None:
        """Waits until the last version is in force.

        Raises:
            RollmeshError: the announcement failed.
        """
        if self._running is not None:
            running, self._running = self._running, None
            self._bridge.result(running, self._rules.timeout_s)

    async def in_force(self) -> None:
        """Returns when the last version is in force; its errors are raised by `wait_in_force`."""
        if (running := self._running) is not None:
            await asyncio.gather(asyncio.shield(asyncio.wrap_future(running)), return_exceptions=True)

    async def _announce(self, policy: PolicyVersion) -> None:
        if self._evaluator is not None and self._evaluating == policy:
            await self._evaluator.start_round(policy)
        await self._client.set_policy_version(self._rules.incarnation, policy.version)
        if self._rules.commit_each and policy.version > 0:
            await self._commit(policy.version, "")

    async def commit_checkpoint(self, version: int, folder: str) -> None:
        """Commits a checkpoint that is whole on disk. Its version, perhaps not the last any more, is in force before.

        Raises:
            FencedError: another learner has taken over; the checkpoint stays, but `latest` does not name it.
            RollmeshError: the buffer did not take it.
        """
        await self.in_force()
        await self._commit(version, folder)

    async def _commit(self, version: int, checkpoint: str) -> None:
        """Commits a version, or the checkpoint of one that may be committed already (`commit: step`)."""
        async with self._committing:
            committed, latest = self._status.durable
            # The buffer takes a checkpoint only with the highest version that it knows as committed.
            self._status.durable = durable = (max(version, committed), checkpoint or latest)
            await self._client.commit(TRAIN, self._rules.incarnation, durable[0], checkpoint=checkpoint)
            self._status.committed = durable[0]
