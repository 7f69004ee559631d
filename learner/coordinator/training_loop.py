"""The training loop, on one page.

One round gathers a batch for the present version, trains on it and copies the next version's weights. Then it records
the step, and begins a checkpoint where one is due. During the next gathering, forward and backward the version is
published and announced. Then that batch is claimed, while the groups of the one after it arrive. The optimizer waits
for the claim's answer; a refused batch changes nothing.

A learner that shares its devices takes them for some batches in a row, and gathers without them (`learner.placement`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.coordinator.batch_claim import CandidateBatch
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.learner.coordinator.step_recorder import FinishedStep, StepRecorder, StepTimings
from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import TrainPlan, plan_training
from rollmesh.learner.distributed.worker import TrainResult
from rollmesh.learner.metrics.mismatch_guard import MismatchGuard, can_be_judged
from rollmesh.learner.placement.turns import Turns
from rollmesh.learner.rollouts.group_stream import Interrupted
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.learner import BatchSection, MismatchSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.trajectory.lineage import Lineage

# Longest wait for the answer of a claim; its client repeats the call for less than this.
_CLAIM_S = 180.0


class BatchSource(Protocol):
    """The source of batches: `learner.coordinator.batch_claim.BatchClaimer`, or a recording."""

    def gather(self, candidate: CandidateBatch, timeout_s: float) -> bool:
        """Fills a candidate; False where there is nothing more to train."""
        ...

    async def claim(self, candidate: CandidateBatch) -> bool:
        """Claims the candidate; False if groups of it were refused, and have to be gathered again."""
        ...

    def discard(self, candidate: CandidateBatch, unusable: Unusable) -> None:
        """Gives back groups of a candidate that cannot be trained; it has to be gathered again."""
        ...


class WeightSink(Protocol):
    """The destination of new weights: `learner.coordinator.version_announcer.VersionAnnouncer`, or nowhere."""

    def publish(self, version: int, *, changed: bool) -> None:
        """Takes the weights of a version as they are now; `changed` where they are others than those before."""
        ...

    def wait_in_force(self) -> None:
        """Waits until the last version can be used."""
        ...

    async def in_force(self) -> None:
        """Returns when the last version can be used."""
        ...


class CheckpointSink(Protocol):
    """The destination of checkpoints: `learner.coordinator.checkpoint_scheduler.CheckpointScheduler`, or nothing."""

    def serve_requests(self, version: int) -> None:
        """Answers requests for a checkpoint."""
        ...

    def write_if_due(self, version: int, *, healthy: bool) -> float:
        """Begins a checkpoint where one is due; returns the seconds for which the training stood still.

        Args:
            version: published last.
            healthy: its batch trained something, and no role's last gradients were all skipped.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the checkpoints so far."""
        ...


@dataclass(frozen=True, slots=True)
class LoopRules:
    """Sizes and end of the loop.

    Attributes:
        lineage: of this learner.
        version: to begin with.
        last_version: the run ends with it.
        planned_end: the version with which schedules end, see `planned_end`.
        batch: sizes.
        max_skipped: batches in a row that may change nothing.
        mismatch: bounds on the difference of learner and generators; None: none.
        stop_at: held-out reward that ends the run; None: none does.
    """

    lineage: Lineage
    version: int
    last_version: int
    planned_end: int
    batch: BatchSection
    max_skipped: int
    mismatch: MismatchSection | None = None
    stop_at: float | None = None

    @classmethod
    def of(cls, config: Config, progress: RunProgress, planned_end: int) -> LoopRules:
        """The rules of a run that a learner continues."""
        learner = config.learner
        return cls(
            progress.lineage,
            version=progress.resumed_at,
            last_version=learner.steps,
            planned_end=planned_end,
            batch=learner.batch,
            max_skipped=learner.max_skipped,
            mismatch=learner.mismatch,
            stop_at=config.eval.stop_at,
        )


class TrainingLoop:
    """Rank 0's loop.

    Args:
        runtime: of rank 0.
        batches: gathered and claimed here.
        weights: published here.
        checkpoints: written here.
        turns: on the devices.
        recorder: of steps; knows the last held-out reward.
        algorithm: estimates the cost of training a group.
        rules: of the run.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        batches: BatchSource,
        weights: WeightSink,
        checkpoints: CheckpointSink,
        turns: Turns,
        recorder: StepRecorder,
        algorithm: Algorithm,
        rules: LoopRules,
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._trajectories = runtime.trajectories
        self._controls = runtime.controls
        self._status = runtime.status
        self._batches = batches
        self._weights = weights
        self._checkpoints = checkpoints
        self._turns = turns
        self._recorder = recorder
        self._algorithm = algorithm
        self._rules = rules
        self._skips = SkipLimit(rules.max_skipped)
        self._guard = MismatchGuard(rules.mismatch) if rules.mismatch is not None else None
        self._candidate = CandidateBatch(rules.version)
        self._timings = StepTimings()
        self.version = rules.version
        self.at_step_boundary = True
        """True while every rank has the weights of `version`, and waits for the next order."""

    def run(self) -> str:
        """Trains until there is a reason to end, and returns it: steps, stop_at, end_of_data, a signal, a request.

        Raises:
            FencedError: another learner has taken over.
            RollmeshError: the run cannot continue.
        """
        self._publish(changed=True)
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, healthy=True)
        self._recorder.start_clock()
        while (reason := self._end_reason()) is None:
            self._checkpoints.serve_requests(self.version)
            self._turns.settle(self.version)
            try:
                if not self._gather_batch():
                    return "end_of_data"
            except Interrupted:
                self._ranks.keep_alive()
                continue
            if self._turns.take(self.version):
                self._train_step()
        return reason

    def _end_reason(self) -> str | None:
        self._controls.raise_failure()
        if self._controls.stop_reason is not None:
            return self._controls.stop_reason
        goal, reward = self._rules.stop_at, self._recorder.eval_reward
        if goal is not None and reward is not None and reward >= goal:
            return "stop_at"
        return "steps" if self.version >= self._rules.last_version else None

    def _gather_batch(self) -> bool:
        """Fills the candidate; False at the end of the data."""
        self._status.phase = "waiting_for_groups"
        began = time.perf_counter()
        try:
            return self._batches.gather(self._candidate, self._ranks.keep_alive_s)
        finally:
            self._timings.wait_s += time.perf_counter() - began

    def _train_step(self) -> None:
        """Trains one batch. One that is refused or unreadable changes nothing, and is gathered again."""
        self._status.phase = "training"
        candidate, timings = self._candidate, self._timings
        began = time.perf_counter()
        self._trajectories.set_batch(candidate.groups)
        unusable = self._ranks.prepare(self._plan(candidate))
        prepared = time.perf_counter()
        timings.prepare_s += prepared - began
        if unusable:
            self._batches.discard(candidate, unusable)
            return
        # A claimed batch counts as used, so every rank must have its share before the claim.
        claim = self._bridge.submit(self._claim(candidate))
        failure: list[RollmeshError] = []

        def claimed() -> bool:
            began = time.perf_counter()
            try:
                self._weights.wait_in_force()
                is_claimed = self._bridge.result(claim, _CLAIM_S, wait=partial(wait_keeping_alive, self._ranks))
            except RollmeshError as error:
                # Every rank returns to its earlier state, as after a refusal, before the run ends.
                failure.append(error)
                is_claimed = False
            timings.claim_s += time.perf_counter() - began
            return is_claimed

        self.at_step_boundary = False
        result = self._ranks.train(claimed)
        timings.train_s = time.perf_counter() - prepared - timings.claim_s
        if result is not None:
            self._finish(candidate, result)
            return
        self.at_step_boundary = True
        if failure:
            raise failure[0]

    async def _claim(self, candidate: CandidateBatch) -> bool:
        await self._weights.in_force()
        return await self._batches.claim(candidate)

    def _plan(self, candidate: CandidateBatch) -> TrainPlan:
        groups, dp_sizes = candidate.groups, self._ranks.dp_sizes
        return plan_training(
            groups,
            version=candidate.version,
            lineage=self._rules.lineage,
            token_budget=self._rules.batch.tokens_per_micro_batch,
            minibatches=self._rules.batch.minibatches,
            dp_sizes=dp_sizes,
            packing=self._ranks.packing,
            cost=self._ranks.sequence_cost,
            shares=[self._algorithm.expected_cost(g.algorithm_view) for g in groups] if max(dp_sizes) > 1 else None,
            end=self._rules.planned_end,
        )

    def _finish(self, batch: CandidateBatch, result: TrainResult) -> None:
        self.version += 1
        self.at_step_boundary = True
        warning = ""
        try:
            if self._guard is not None:
                metas = (member.meta for group in batch.groups for member in group.members)
                warning = self._guard.check(batch.version, result.mismatch if can_be_judged(metas) else None)
            self._publish(changed=result.policy_changed)
        finally:
            # The batch is trained, also where its publication fails.
            self._record_step(batch, result, warning)
        self._turns.batch_trained()
        self._skips.record(batch.version, result.all_skipped)
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, healthy=self._skips.healthy)

    def _record_step(self, batch: CandidateBatch, result: TrainResult, warning: str) -> None:
        timings, self._timings = self._timings, StepTimings()
        self._candidate = CandidateBatch(self.version)
        self._recorder.record_step(
            FinishedStep(
                trained_version=batch.version,
                groups=batch.groups,
                dropped=dict(batch.dropped),
                metrics=result.metrics,
                skipped=result.skipped,
                timings=timings.as_metrics() | result.speed | self._checkpoints.metrics() | self._turns.metrics(),
                mismatch_warning=warning,
            ),
            result.tokens,
        )

    def _publish(self, *, changed: bool) -> None:
        self._status.phase = "publishing"
        began = time.perf_counter()
        self._weights.publish(self.version, changed=changed)
        self._timings.publish_s = time.perf_counter() - began
