"""The training loop, on one page.

One turn: gather a batch for the present version, train on it, publish the next version, book it, write a checkpoint
where one is due. While a batch goes forward and backward, its claim is made, the last version is announced and the
groups of the next batch come in; the optimizer waits for the claim's answer, and a refused batch changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from rollmesh.learner.algorithms.types import Group
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.batch_claim import CandidateBatch
from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.learner.coordinator.step_recorder import FinishedStep, StepRecorder, StepTimings
from rollmesh.learner.distributed.rank_group import RankGroup
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import TrainPlan, plan_training
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.distributed.worker import TrainResult
from rollmesh.learner.metrics.run_totals import RunTotals
from rollmesh.learner.rollouts.group_filter import algorithm_view
from rollmesh.learner.rollouts.group_stream import Interrupted
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.models import BatchSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.service import AsyncBridge
from rollmesh.mesh.trajectory.lineage import Lineage

if TYPE_CHECKING:
    from torch import Tensor

TURN_S = 30.0
"""Longest wait of rank 0 before the other ranks hear that they are to wait further."""
# Longest wait for the answer of a claim; its client repeats the call for less than this.
_CLAIM_S = 180.0


class BatchSource(Protocol):
    """Where batches come from: `learner.coordinator.batch_claim.BatchClaimer`, or a recording."""

    def gather(self, candidate: CandidateBatch, timeout_s: float) -> bool:
        """Fills a candidate; False where there is nothing more to train."""
        ...

    async def claim(self, candidate: CandidateBatch) -> bool:
        """Makes the candidate ours; False where some of it was refused, and has to be gathered again."""
        ...

    def discard(self, candidate: CandidateBatch, unusable: Unusable) -> None:
        """Gives back groups of a candidate that cannot be trained; it has to be gathered again."""
        ...


class WeightSink(Protocol):
    """Where new weights go: `learner.coordinator.version_announcer.VersionAnnouncer`, or nowhere."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the weights of a version; exhausts `tensors`."""
        ...

    async def in_force(self) -> None:
        """Returns when the last version can be used."""
        ...


class CheckpointSink(Protocol):
    """Who writes checkpoints: `learner.coordinator.checkpoint_scheduler.CheckpointScheduler`, or nobody."""

    def serve_requests(self, version: int) -> None:
        """Answers requests for a checkpoint."""
        ...

    def write_if_due(self, version: int, *, changed: bool) -> float:
        """Writes a checkpoint where one is due; returns the seconds it took.

        Args:
            version: in force.
            changed: its weights differ from those of the version before.
        """
        ...


class TrainingLoop:
    """Rank 0's loop.

    Args:
        bridge: the event loop.
        ranks: all ranks.
        claimer: gets batches.
        held: where one rank keeps its payloads.
        announcer: makes versions public.
        checkpoints: writes what is durable.
        recorder, run_totals: keep the books.
        controls, status: to and from others.
        lineage: of this learner.
        batch: sizes.
        version: that the learner starts from.
        last_version: the run ends with it.
        good_enough: whether the held-out reward has reached its goal.
        expected_cost: see `Algorithm.expected_cost`.
        max_skipped: batches in a row that may change nothing.
    """

    def __init__(
        self,
        *,
        bridge: AsyncBridge,
        ranks: RankGroup,
        claimer: BatchSource,
        held: InlineTrajectories,
        announcer: WeightSink,
        checkpoints: CheckpointSink,
        recorder: StepRecorder,
        run_totals: RunTotals,
        controls: ControlRequests,
        status: LearnerStatus,
        lineage: Lineage,
        batch: BatchSection,
        version: int,
        last_version: int,
        good_enough: Callable[[], bool],
        expected_cost: Callable[[Group], float],
        max_skipped: int,
    ) -> None:
        self._bridge = bridge
        self._ranks = ranks
        self._claimer = claimer
        self._held = held
        self._announcer = announcer
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._run_totals = run_totals
        self._controls = controls
        self._status = status
        self._lineage = lineage
        self._batch = batch
        self._last_version = last_version
        self._good_enough = good_enough
        self._expected_cost = expected_cost
        self._skips = SkipLimit(max_skipped)
        self._candidate = CandidateBatch(version)
        self._timings = StepTimings()
        self.version = version
        self.at_step_boundary = True
        """Whether every rank has the weights of `version`, and waits for the next order."""

    def run(self) -> str:
        """Trains until there is a reason to end, and returns it: steps, stop_at, end_of_data, a signal, a request.

        Raises:
            FencedError: another learner has taken over.
            RollmeshError: the run cannot go on.
        """
        self._publish()
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, changed=True)
        self._run_totals.start_clock()
        while (reason := self._end_reason()) is None:
            self._checkpoints.serve_requests(self.version)
            try:
                if not self._gather_batch():
                    return "end_of_data"
            except Interrupted:
                self._ranks.keep_alive()
                continue
            self._train_step()
        return reason

    def _end_reason(self) -> str | None:
        self._controls.raise_failure()
        if self._controls.stop_reason is not None:
            return self._controls.stop_reason
        if self._good_enough():
            return "stop_at"
        return "steps" if self.version >= self._last_version else None

    def _gather_batch(self) -> bool:
        """Fills the candidate; False at the end of the data."""
        self._status.phase = "waiting_for_groups"
        began = time.perf_counter()
        try:
            return self._claimer.gather(self._candidate, TURN_S)
        finally:
            self._timings.wait_s += time.perf_counter() - began

    def _train_step(self) -> None:
        """One batch; where it is not ours, or cannot be read, nothing changes, and it is gathered again."""
        self._status.phase = "training"
        candidate, timings = self._candidate, self._timings
        began = time.perf_counter()
        self._held.hold(candidate.groups)
        unusable = self._ranks.prepare(self._plan(candidate))
        prepared = time.perf_counter()
        timings.prepare_s += prepared - began
        if unusable:
            self._claimer.discard(candidate, unusable)
            return
        # What is claimed counts as used: every rank has its share before.
        claim = self._bridge.submit(self._claim(candidate))
        failure: list[RollmeshError] = []

        def claimed() -> bool:
            began = time.perf_counter()
            try:
                ours = self._bridge.result(claim, _CLAIM_S)
            except RollmeshError as error:
                # Every rank goes back to where it was, as after a refusal, before the run ends.
                failure.append(error)
                ours = False
            timings.claim_s += time.perf_counter() - began
            return ours

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
        await self._announcer.in_force()
        return await self._claimer.claim(candidate)

    def _plan(self, candidate: CandidateBatch) -> TrainPlan:
        ranks = self._ranks.size
        return plan_training(
            candidate.groups,
            version=candidate.version,
            lineage=self._lineage,
            token_budget=self._batch.tokens_per_micro_batch,
            minibatches=self._batch.minibatches,
            ranks=ranks,
            packing=self._ranks.packing,
            shares=[self._expected_cost(algorithm_view(g)) for g in candidate.groups] if ranks > 1 else None,
        )

    def _finish(self, batch: CandidateBatch, result: TrainResult) -> None:
        self.version += 1
        self.at_step_boundary = True
        try:
            self._publish()
        finally:
            # It is trained, whatever becomes of its publication.
            self._record_step(batch, result)
        self._skips.record(batch.version, result.stopped)
        changed = self._skips.last_batch_stepped
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, changed=changed)

    def _record_step(self, batch: CandidateBatch, result: TrainResult) -> None:
        timings, self._timings = self._timings, StepTimings()
        self._candidate = CandidateBatch(self.version)
        self._recorder.record_step(
            FinishedStep(
                step=self._run_totals.steps + 1,
                incarnation=self._lineage.resumed[-1][0],
                trained_version=batch.version,
                groups=batch.groups,
                dropped=dict(batch.dropped),
                metrics=result.metrics,
                skipped=result.skipped,
                timings=timings.as_metrics(),
                wall_s=self._run_totals.elapsed_s,
            )
        )

    def _publish(self) -> None:
        self._status.phase = "publishing"
        began = time.perf_counter()
        self._announcer.publish(self.version, self._ranks.export())
        self._timings.publish_s = time.perf_counter() - began
