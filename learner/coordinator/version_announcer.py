"""Making versions public, in the one right order: weights fetchable, evaluation seeded, version in force.

Invariants: a version comes into force only when its weights can be fetched; announcements never overtake one another,
because each waits for the one before; training goes on while the buffer is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.evaluation.evaluator import Evaluator
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.mesh.runtime.service import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


class VersionAnnouncer:
    """Publishes the versions of one learner.

    Args:
        bridge: the event loop.
        client: of the buffer.
        publisher: holds the weights.
        evaluator: None without held-out data.
        status: told what is published.
        incarnation: of this learner.
        wire_dtype: dtype in which weights travel.
        evaluate_at: whether a version is due for evaluation.
        commit_each: every step counts as trained at once (`commit: step`).
        timeout_s: deadline of one announcement.
    """

    def __init__(
        self,
        bridge: AsyncBridge,
        client: BufferClient,
        publisher: WeightPublisher,
        evaluator: Evaluator | None,
        status: LearnerStatus,
        *,
        incarnation: int,
        wire_dtype: str,
        evaluate_at: Callable[[int], bool],
        commit_each: bool,
        timeout_s: float,
    ) -> None:
        self._bridge = bridge
        self._client = client
        self._publisher = publisher
        self._evaluator = evaluator
        self._status = status
        self._incarnation = incarnation
        self._wire_dtype = wire_dtype
        self._evaluate_at = evaluate_at
        self._commit_each = commit_each
        self._timeout_s = timeout_s
        self._running: Future[None] | None = None
        self._evaluating: PolicyVersion | None = None

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Makes the weights fetchable and starts to announce them; errors of the announcement before come out here.

        Raises:
            FencedError: another learner has taken over.
            WeightsError: the weights could not be stored.
        """
        self.wait_in_force()
        policy = PolicyVersion(self._incarnation, version)
        self._publisher.publish(policy, tensors, self._wire_dtype)
        self._status.published = policy
        due = self._evaluator is not None and (self._evaluator.retry_due or self._evaluate_at(version))
        self._evaluating = policy if due else None
        self._running = self._bridge.submit(self._announce(policy))

    def is_evaluated(self, version: int) -> bool:
        """Whether the last version, which is `version`, is or was evaluated; waits until it is in force if it is due.

        Raises:
            RollmeshError: the announcement failed.
        """
        policy = PolicyVersion(self._incarnation, version)
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
            self._bridge.result(running, self._timeout_s)

    async def in_force(self) -> None:
        """Returns when the last version is in force; its errors come out of `settle`."""
        if (running := self._running) is not None:
            await asyncio.gather(asyncio.shield(asyncio.wrap_future(running)), return_exceptions=True)

    async def _announce(self, policy: PolicyVersion) -> None:
        if self._evaluator is not None and self._evaluating == policy:
            await self._evaluator.begin(policy)
        await self._client.set_policy_version(self._incarnation, policy.version)
        if self._commit_each and policy.version > 0:
            self._status.durable = (policy.version, self._status.durable[1])
            await self._client.commit("train", self._incarnation, policy.version)
            self._status.committed = policy.version
