"""Batches that may be trained: leased, filtered by the algorithm, claimed.

Invariants:
- a claimed batch has the configured number of groups, fewer only at the end of the data, each under a held lease;
- a group that is not trained is returned with a reason and replaced at the same version;
- a refusal concerns one lease, never a living one of the same group;
- replacements are bounded by a named error;
- the claim is durable, and logged on disk, before its answer lets the optimizer step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollmesh.buffer.client.client import Lease
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.coordinator.checkpoint_scheduler import CheckpointScheduler
from rollmesh.learner.coordinator.priorities import PrioritySetter
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.train_table import TrainTable
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.metrics.batch_traces import BatchTraces
from rollmesh.learner.recovery.consumption_log import ConsumptionLog, StepUse, UsedGroup
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.learner.rollouts.group_filter import filter_groups
from rollmesh.learner.rollouts.group_stream import UNREADABLE
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import StarvedError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.telemetry.tracing import no_traces
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
# Groups that may be dropped for one version, in batches, before the run ends with an error.
MAX_DROPPED_BATCHES = 10

# Longest answer of the event loop to a call that itself is bounded (clients retry for less than this).
_ANSWER_S = 180.0


@dataclass(slots=True, eq=False)
class CandidateBatch:
    """Groups gathered for one version, not claimed yet.

    Attributes:
        version: policy version that they will train.
        groups: those kept, in the order in which they came.
        dropped: groups given back so far for this version, by reason.
    """

    version: int
    groups: list[SampledGroup] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """Sizes and identities of claims.

    Attributes:
        incarnation: of this learner.
        resumed_at: version from which it continues the run.
        groups: per batch.
        last_version: the run ends with it, so that no group is requested for it.
    """

    incarnation: int
    resumed_at: int
    groups: int
    last_version: int

    @classmethod
    def of(cls, config: Config, progress: RunProgress) -> ClaimRules:
        """The rules of a run that a learner continues."""
        learner = config.learner
        return cls(progress.incarnation, progress.resumed_at, learner.batch.groups, learner.steps)


class BatchClaimer:
    """Gathers and claims the batches of rank 0. `gather` belongs to the main thread, the rest to the event loop.

    Args:
        bridge: the event loop.
        table: has the groups, and is notified of claims.
        algorithm: keeps or drops groups.
        log: records claims.
        checkpoints: asked for a checkpoint where the buffer needs one.
        rules: of the run.
        priorities: sets those of groups that may be used again; None: they have none.
        traces: hear of claims, and of groups that are dropped; None: there are none.
    """

    def __init__(
        self,
        bridge: AsyncBridge,
        table: TrainTable,
        algorithm: Algorithm,
        log: ConsumptionLog,
        checkpoints: CheckpointScheduler,
        rules: ClaimRules,
        priorities: PrioritySetter | None = None,
        traces: BatchTraces | None = None,
    ) -> None:
        self._bridge = bridge
        self._table = table
        self._algorithm = algorithm
        self._consumption = log
        self._checkpoints = checkpoints
        self._rules = rules
        self._priorities = priorities
        self._traces = traces or BatchTraces(no_traces(), rules.incarnation)

    def gather(self, candidate: CandidateBatch, timeout_s: float) -> bool:
        """Fills a candidate up to the batch size.

        Returns:
            False where the data has ended and there is nothing to train.

        Raises:
            Interrupted: groups are still missing after `timeout_s`, or the wait was interrupted; the candidate keeps
                what it has.
            StarvedError: too many groups were dropped.
            RewardError: a response lacks a reward component that the algorithm needs.
        """
        while True:
            waiting = self._table.groups.next_batch(candidate.version, self._rules.groups, timeout_s)
            held = self._bridge.call(waiting, timeout_s + _ANSWER_S)
            known = set(candidate.groups)
            kept, dropped = filter_groups(self._algorithm, [group for group in held if group not in known])
            known.update(kept)
            # A group that is not held any more, under this lease, leaves the candidate as well.
            candidate.groups = [group for group in held if group in known]
            for reason, groups in dropped.items():
                self._drop(candidate, groups, reason)
            if not dropped or len(held) < self._rules.groups:
                return bool(candidate.groups)

    def discard(self, candidate: CandidateBatch, unusable: Unusable) -> None:
        """Returns groups that cannot be trained as failed; the next `gather` replaces them.

        Args:
            candidate: has them.
            unusable: why, by group.

        Raises:
            StarvedError: too many groups were dropped.
        """
        groups = [group for group in candidate.groups if group.group_id in unusable]
        for group in groups:
            why = unusable[group.group_id]
            log.warning("group %s is unusable: %s", group.group_id, why, extra={"group": group.group_id})
        self._drop(candidate, groups, UNREADABLE, buffer_pb2.NACK_DISPOSITION_FAIL)

    async def claim(self, candidate: CandidateBatch) -> bool:
        """Claims and logs a candidate.

        Returns:
            Whether it is claimed. If not, no group is, and groups with refused leases (lost, say) leave the
            candidate when it is gathered again: others take their place.

        Raises:
            ConfigError: the user's priority function has failed.
            FencedError: another learner has taken over.
        """
        if self._priorities is not None:
            # Before the claim: after it the groups may be drawn again, and nothing may fail any more.
            await self._priorities.set(candidate.groups)
        response = await self._table.recovery.with_recovery(lambda: self._claim_and_log(candidate))
        if not response.claimed:
            for refusal in response.refused:
                log.warning("claim refused: %s", refusal.reason, extra={"group": refusal.group_id})
                candidate.dropped[refusal.reason] += 1
            self._check_bound(candidate)
            self._table.groups.drop_refused(Lease.of(refusal) for refusal in response.refused)
            return False
        self._table.groups.finish_version(candidate.version, candidate.groups)
        self._table.seeder.batch_used()
        if candidate.version + 1 < self._rules.last_version:
            self._table.groups.request(candidate.version + 1, self._rules.groups)
        if response.checkpoint_wanted:
            self._checkpoints.request()
        if self._table.samples is not None:
            candidate.groups = await self._table.samples.fill(candidate.groups)
        if self._table.recorder is not None:
            await self._table.recorder.record(candidate.version, candidate.groups, candidate.dropped)
        return True

    async def _claim_and_log(self, candidate: CandidateBatch) -> buffer_pb2.ClaimResponse:
        """Claims and logs groups once; the claim is on disk when this returns."""
        rules, leases = self._rules, [group.lease for group in candidate.groups]
        began_ns = time.time_ns()
        response = await self._table.client.claim(TRAIN, rules.incarnation, candidate.version, leases)
        if response.claimed:
            groups = [
                UsedGroup(g.group_id, [m.meta.member for m in g.scored_members], g.leased.task.ordinal, g.leased.use)
                for g in candidate.groups
            ]
            use = StepUse(rules.incarnation, candidate.version, rules.resumed_at, began_ns, groups)
            await asyncio.to_thread(self._consumption.append, use)
            self._traces.claimed(candidate.version, candidate.groups, began_ns)
        return response

    def _drop(
        self,
        candidate: CandidateBatch,
        groups: Sequence[SampledGroup],
        reason: str,
        disposition: buffer_pb2.NackDisposition = buffer_pb2.NACK_DISPOSITION_FILTER,
    ) -> None:
        candidate.dropped[reason] += len(groups)
        self._bridge.call(self._return(groups, disposition, reason), _ANSWER_S)
        self._check_bound(candidate)

    async def _return(
        self, groups: Sequence[SampledGroup], disposition: buffer_pb2.NackDisposition, reason: str
    ) -> None:
        await self._table.groups.return_groups(groups, disposition, reason)
        fate = "failed" if disposition == buffer_pb2.NACK_DISPOSITION_FAIL else "filtered"
        self._traces.dropped(groups, fate, reason)

    def _check_bound(self, candidate: CandidateBatch) -> None:
        if candidate.dropped.total() > MAX_DROPPED_BATCHES * self._rules.groups:
            raise StarvedError(
                f"{candidate.dropped.total()} groups were dropped before version {candidate.version} had a batch: "
                f"{dict(candidate.dropped)}",
                hint="check the rewards (`rollmesh samples`) and the algorithm's filters",
            )
