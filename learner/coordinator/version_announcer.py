"""Publication of versions in the one right order: evaluation seeded, weights fetchable, version in force.

Invariants: a version comes into force only when its weights can be fetched. Publications and announcements never
overtake one another, because each waits for the one before; neither do commits. The training thread copies the weights;
all else happens while the next batch is gathered and trained, and ends before that batch is claimed. A version that is
evaluated is the exception, where the best checkpoint is kept. Training waits until it is in force, for only then is it
known whether it gets a checkpoint. Weights that have not changed are announced under the next version, and travel no
more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.callbacks.interface import NO_CALLBACKS, EventSink, PublishedVersion
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.distributed.weight_export import PUBLICATION_S
from rollmesh.learner.evaluation.evaluator import Evaluator
from rollmesh.learner.liveness.rank_watch import is_collective_failure
from rollmesh.learner.metrics.batch_traces import BatchTraces
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import RollmeshError, WeightsError, ended_by
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.telemetry.tracing import no_traces
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnnouncementRules:
    """Settings of announcements and evaluations.

    Attributes:
        incarnation: of this learner.
        commit_each: every step counts as trained at once (`commit: step`).
        timeout_s: deadline of one announcement, from the moment at which its weights can be fetched.
        evaluate_first: version that is evaluated whatever `evaluate_every` is; None: no such version.
        evaluate_every: versions from one evaluation to the next; None: only the first and the last.
        evaluated: a version that has a result, as the one may from which the run continues; it is not asked again.
    """

    incarnation: int
    commit_each: bool
    timeout_s: float
    evaluate_first: int | None
    evaluate_every: int | None
    evaluated: int | None = None

    @classmethod
    def of(cls, config: Config, progress: RunProgress, timeout_s: float) -> AnnouncementRules:
        """The rules of a run that a learner continues; a run without a result begins with an evaluation."""
        resumed_at = progress.resumed_at
        return cls(
            incarnation=progress.incarnation,
            commit_each=config.buffer.commit == "step",
            timeout_s=timeout_s,
            evaluate_first=None if progress.totals.evals else resumed_at,
            evaluate_every=config.eval.every_steps,
            evaluated=resumed_at if any(found["version"] == resumed_at for found in progress.totals.evals) else None,
        )

    def evaluates(self, version: int) -> bool:
        """True where a version is due for evaluation."""
        every = self.evaluate_every
        if version == self.evaluated:
            return False
        return version == self.evaluate_first or (every is not None and version > 0 and version % every == 0)


class VersionAnnouncer:
    """Publishes the versions of one learner.

    Args:
        runtime: of rank 0.
        client: of the buffer.
        publisher: holds the weights.
        evaluator: None without held-out data.
        rules: of the run.
        callbacks: hear of versions in force.
        traces: hear of publications and commits; None: there are none.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        client: BufferClient,
        publisher: WeightPublisher,
        evaluator: Evaluator | None,
        rules: AnnouncementRules,
        callbacks: EventSink = NO_CALLBACKS,
        traces: BatchTraces | None = None,
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._controls = runtime.controls
        self._status = runtime.status
        self._client = client
        self._publisher = publisher
        self._evaluator = evaluator
        self._rules = rules
        self._callbacks = callbacks
        self._traces = traces or BatchTraces(no_traces(), rules.incarnation)
        self._committing = asyncio.Lock()
        # The last version that was given, and its announcement.
        self._running: tuple[int, Future[None]] | None = None
        self._evaluating: PolicyVersion | None = None

    def publish(self, version: int, *, changed: bool) -> None:
        """Copies the weights and starts to publish and announce them; raises errors of the version before.

        Args:
            version: the next.
            changed: its weights are others than those of the version before.

        Raises:
            FencedError: another learner has taken over.
            WeightsError: the weights could not be stored.
        """
        self.wait_in_force()
        policy = PolicyVersion(self._rules.incarnation, version)
        due = self._evaluator is not None and (self._evaluator.retry_due or self._rules.evaluates(version))
        self._evaluating = policy if due else None
        seeded = due and self._seed_evaluation(policy)
        publishing = None
        if changed:
            publishing = self._ranks.export(self._publisher, policy)
        else:
            self._publisher.republish(policy)
        running = self._bridge.submit(self._announce(policy, publishing, evaluates=seeded))
        self._running = version, running
        running.add_done_callback(self._end_run_on_failure)

    def _seed_evaluation(self, policy: PolicyVersion) -> bool:
        """Seeds the round of a version before its weights can be fetched: with bound 0 it goes ahead of training."""
        assert self._evaluator is not None
        seeding = self._bridge.submit(self._evaluator.seed_round(policy))
        return self._bridge.result(seeding, self._rules.timeout_s, wait=partial(wait_keeping_alive, self._ranks))

    def is_evaluated(self, version: int) -> bool:
        """True where `version`, the last one, is or was evaluated; waits until it is in force if it is due.

        Raises:
            RollmeshError: the announcement failed.
        """
        policy = PolicyVersion(self._rules.incarnation, version)
        if self._evaluating == policy:
            self.wait_in_force()
        return self._evaluator is not None and self._evaluator.policy == policy

    @property
    def evaluation_is_open(self) -> bool:
        """True while held-out prompts are answered, or are about to be, by a version that was given to `publish`."""
        if self._evaluator is None:
            return False
        announcing = self._running is not None and not self._running[1].done()
        return (announcing and self._evaluating is not None) or self._evaluator.is_running

    def wait_in_force(self) -> None:
        """Waits until the last version is in force.

        Raises:
            RollmeshError: the announcement failed.
        """
        if self._running is not None:
            before, (_, running) = self._status.phase, self._running
            if not running.done():
                # A slow weights.dir is no step that hangs.
                self._status.phase = "publishing"
            most_s = PUBLICATION_S + self._rules.timeout_s
            self._bridge.result(running, most_s, wait=partial(wait_keeping_alive, self._ranks))
            self._running, self._status.phase = None, before

    async def in_force(self) -> None:
        """Returns when the last version is in force.

        Raises:
            RollmeshError: its publication or announcement failed.
        """
        if self._running is not None:
            _, running = self._running
            await asyncio.shield(asyncio.wrap_future(running))

    def wait_announced(self, version: int) -> None:
        """Waits until a version is in force, or its announcement has failed, which ends the run by itself.

        Later versions are not waited for: their publication may take longer than all that waits for this one. To be
        called by a thread that does not train.

        Args:
            version: given to `publish` before.
        """
        running = self._running
        if running is not None and running[0] <= version:
            wait([running[1]], PUBLICATION_S + self._rules.timeout_s)

    async def _announce(
        self, policy: PolicyVersion, publishing: Future[weights_pb2.Manifest | None] | None, *, evaluates: bool
    ) -> None:
        began_ns = time.time_ns()
        if publishing is not None:
            try:
                await asyncio.wait_for(asyncio.wrap_future(publishing), PUBLICATION_S)
            except TimeoutError:
                raise WeightsError(
                    f"version {policy} could not be fetched after {PUBLICATION_S:.0f} s",
                    hint="is weights.dir slow, or does a rank hang?",
                ) from None
        self._status.published = policy
        if self._evaluator is not None and evaluates:
            self._evaluator.collect_round(policy)
        await self._client.set_policy_version(self._rules.incarnation, policy.version)
        self._callbacks.emit(PublishedVersion(policy.incarnation, policy.version))
        self._traces.published(policy, began_ns)
        if self._rules.commit_each and policy.version > 0:
            await self._commit(policy.version, "")

    async def commit_checkpoint(self, version: int, folder: str) -> None:
        """Commits a checkpoint that is whole on disk, after `wait_announced`. Its version may not be the last any more.

        Raises:
            FencedError: another learner has taken over; the checkpoint stays, but `latest` does not name it.
            RollmeshError: the buffer did not take it.
        """
        await self._commit(version, folder)

    async def _commit(self, version: int, checkpoint: str) -> None:
        """Commits a version, or the checkpoint of one that may be committed already (`commit: step`)."""
        async with self._committing:
            committed, latest = self._status.durable
            # The buffer takes a checkpoint only with the highest version that it knows as committed.
            self._status.durable = durable = (max(version, committed), checkpoint or latest)
            await self._client.commit(TRAIN, self._rules.incarnation, durable[0], checkpoint=checkpoint)
            self._status.committed = durable[0]
            self._traces.committed(durable[0])

    def close(self) -> None:
        """Gives up a publication that is under way: the run ends, and its channel to the mesh is about to close."""
        if self._running is not None:
            self._running[1].cancel()

    def _end_run_on_failure(self, announced: Future[None]) -> None:
        """Ends a wait for groups, which do not come without the version."""
        if announced.cancelled() or (error := announced.exception()) is None:
            return
        if is_collective_failure(error):
            # The next order to the ranks fails as well, and the watch says which one was lost.
            self._controls.wake()
            return
        if not isinstance(error, RollmeshError):
            log.error("a publication failed", exc_info=error)
        self._controls.fail(ended_by(error, "the publication of the weights"))
