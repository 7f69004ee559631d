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
from rollmesh.learner.control_requests import Controls
from rollmesh.learner.coordinator.batch_claim import Candidate
from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.learner.coordinator.step_recorder import FinishedStep, Recorder, StepTimings
from rollmesh.learner.distributed.rank_group import Team
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import TrainPlan, plan_training
from rollmesh.learner.distributed.trajectories import HeldPayloads
from rollmesh.learner.distributed.worker import TrainResult
from rollmesh.learner.metrics.run_totals import RunFigures
from rollmesh.learner.rollouts.group_filter import algorithm_view
from rollmesh.learner.rollouts.group_stream import Interrupted
from rollmesh.learner.status import LearnerState
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


class Batches(Protocol):
    """Where batches come from: `learner.coordinator.batch_claim.BatchClaimer`, or a recording."""

    def gather(self, candidate: Candidate, timeout_s: float) -> bool:
        """Fills a candidate; False where there is nothing more to train."""
        ...

    async def claim(self, candidate: Candidate) -> bool:
        """Makes the candidate ours; False where some of it was refused, and has to be gathered again."""
        ...

    def discard(self, candidate: Candidate, unusable: Unusable) -> None:
        """Gives back groups of a candidate that cannot be trained; it has to be gathered again."""
        ...


class Versions(Protocol):
    """Where new weights go: `learner.coordinator.version_announcer.Announcer`, or nowhere."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes the weights of a version; exhausts `tensors`."""
        ...

    async def in_force(self) -> None:
        """Returns when the last version can be used."""
        ...


class Durable(Protocol):
    """Who writes checkpoints: `learner.coordinator.checkpoint_scheduler.CheckpointKeeper`, or nobody."""

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
        team: all ranks.
        claimer: gets batches.
        held: where one rank keeps its payloads.
        announcer: makes versions public.
        checkpoints: writes what is durable.
        recorder, figures: keep the books.
        controls, state: to and from others.
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
        team: Team,
        claimer: Batches,
        held: HeldPayloads,
        announcer: Versions,
        checkpoints: Durable,
        recorder: Recorder,
        figures: RunFigures,
        controls: Controls,
        state: LearnerState,
        lineage: Lineage,
        batch: BatchSection,
        version: int,
        last_version: int,
        good_enough: Callable[[], bool],
        expected_cost: Callable[[Group], float],
        max_skipped: int,
    ) -> None:
        self._bridge = bridge
        self._team = team
        self._claimer = claimer
        self._held = held
        self._announcer = announcer
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._figures = figures
        self._controls = controls
        self._state = state
        self._lineage = lineage
        self._batch = batch
        self._last_version = last_version
        self._good_enough = good_enough
        self._expected_cost = expected_cost
        self._skips = SkipLimit(max_skipped)
        self._candidate = Candidate(version)
        self._timings = StepTimings()
        self.version = version
        self.whole = True
        """Whether every rank has the weights of `version`, and waits for the next order."""

    def run(self) -> str:
        """Trains until there is a reason to end, and returns it: steps, stop_at, end_of_data, a signal, a request.

        Raises:
            FencedError: another learner has taken over.
            RollmeshError: the run cannot go on.
        """
        self._publish()
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, changed=True)
        self._figures.begin()
        while (reason := self._why_end()) is None:
            self._checkpoints.serve_requests(self.version)
            try:
                if not self._gather():
                    return "end_of_data"
            except Interrupted:
                self._team.keep_waiting()
                continue
            self._train()
        return reason

    def _why_end(self) -> str | None:
        self._controls.raise_failure()
        if self._controls.stop_reason is not None:
            return self._controls.stop_reason
        if self._good_enough():
            return "stop_at"
        return "steps" if self.version >= self._last_version else None

    def _gather(self) -> bool:
        """Fills the candidate; False at the end of the data."""
        self._state.phase = "waiting_for_groups"
        began = time.perf_counter()
        try:
            return self._claimer.gather(self._candidate, TURN_S)
        finally:
            self._timings.wait_s += time.perf_counter() - began

    def _train(self) -> None:
        """One batch; where it is not ours, or cannot be read, nothing changes, and it is gathered again."""
        self._state.phase = "training"
        candidate, timings = self._candidate, self._timings
        began = time.perf_counter()
        self._held.hold(candidate.groups)
        unusable = self._team.prepare(self._plan(candidate))
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

        self.whole = False
        result = self._team.train(claimed)
        timings.train_s = time.perf_counter() - prepared - timings.claim_s
        if result is not None:
            self._finish(candidate, result)
            return
        self.whole = True
        if failure:
            raise failure[0]

    async def _claim(self, candidate: Candidate) -> bool:
        await self._announcer.in_force()
        return await self._claimer.claim(candidate)

    def _plan(self, candidate: Candidate) -> TrainPlan:
        ranks = self._team.ranks
        return plan_training(
            candidate.groups,
            version=candidate.version,
            lineage=self._lineage,
            token_budget=self._batch.tokens_per_micro_batch,
            minibatches=self._batch.minibatches,
            ranks=ranks,
            packing=self._team.packing,
            shares=[self._expected_cost(algorithm_view(g)) for g in candidate.groups] if ranks > 1 else None,
        )

    def _finish(self, batch: Candidate, result: TrainResult) -> None:
        self.version += 1
        self.whole = True
        try:
            self._publish()
        finally:
            # It is trained, whatever becomes of its publication.
            self._book(batch, result)
        self._skips.trained(batch.version, result.stopped)
        changed = self._skips.changes
        self._timings.checkpoint_s = self._checkpoints.write_if_due(self.version, changed=changed)

    def _book(self, batch: Candidate, result: TrainResult) -> None:
        timings, self._timings = self._timings, StepTimings()
        self._candidate = Candidate(self.version)
        self._recorder.step(
            FinishedStep(
                step=self._figures.steps + 1,
                incarnation=self._lineage.resumed[-1][0],
                trained_version=batch.version,
                groups=batch.groups,
                dropped=dict(batch.dropped),
                metrics=result.metrics,
                skipped=result.skipped,
                timings=timings.as_metrics(),
                wall_s=self._figures.elapsed_s,
            )
        )

    def _publish(self) -> None:
        self._state.phase = "publishing"
        began = time.perf_counter()
        self._announcer.publish(self.version, self._team.export())
        self._timings.publish_s = time.perf_counter() - began
