"""Watches the mesh for the learner: heartbeats' gauges, the buffer's clocks, and reasons to end the run.

Invariants: a learner that was taken over, or that has lost the mesh, ends through `ControlRequests.fail`. If all groups
fail, the run ends with an error that names the reason; it does not use up the data set in silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import get_args

import psutil

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.batch_claim import MAX_DROPPED_BATCHES
from rollmesh.learner.liveness.stall_reporter import StallReporter
from rollmesh.learner.metrics.prometheus import LearnerMetrics
from rollmesh.learner.status import LearnerStatus, Phase
from rollmesh.mesh.errors import FencedError, RollmeshError, StarvedError, ended_by
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.tables import FAILED_EXAMINED, TRAIN
from rollmesh.mesh.wait import Wait
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
# A wait for groups is logged when it begins to matter, and then at this interval.
_WAIT_LOG_S = 15.0
# A phase that takes longer is reported with its seconds.
_LONG_PHASE_S = 10.0


class MeshMonitor:
    """A task on the event loop.

    Args:
        client: of the buffer.
        agent: this learner's membership.
        status, controls: of this learner.
        stalls: reports stalls.
        batch: groups per batch.
    """

    def __init__(
        self,
        client: BufferClient,
        agent: MembershipAgent,
        status: LearnerStatus,
        controls: ControlRequests,
        stalls: StallReporter,
        *,
        batch: int,
    ) -> None:
        self._client = client
        self._agent = agent
        self._status = status
        self._controls = controls
        self._stalls = stalls
        self._batch = batch
        self._process = psutil.Process()
        self.metrics = LearnerMetrics()
        """For Prometheus."""
        self._task: asyncio.Task[None] | None = None
        self._failed_at_step = (-1, 0)
        # The step at which a checkpoint was asked for to make room, and its answer.
        self._relief: tuple[int, Future[tuple[Path, int]] | None] = (-1, None)
        self._waiting_since: float | None = None
        self._phase, self._phase_since = ("", 0), 0.0
        self._changed = asyncio.Event()
        self.described = buffer_pb2.DescribeResponse()
        """The table `train` as last described."""

    def start(self) -> None:
        """Begins to watch."""
        self._agent.on_change(self._changed.set)
        self._task = asyncio.create_task(self._run(), name="monitor")
        self._task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stalls.close()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Ends the run: unwatched it might stall, or train on after another learner has taken it over."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("watching the mesh failed", exc_info=error)
        self._controls.fail(ended_by(error, "watching the mesh"))

    async def refresh(self) -> buffer_pb2.DescribeResponse:
        """Describes the table now."""
        self.described = await self._client.describe(TRAIN)
        self._status.committed = self.described.committed_version
        return self.described

    def clocks(self) -> dict[str, float]:
        """The buffer's cumulative waiting clocks and this learner's of stalls, in seconds, and how many stalls."""
        stalls = self._stalls.gauges()
        return {
            "waiting_for_inserts_s": self.described.waiting_for_inserts_ms / 1e3,
            "waiting_for_samples_s": self.described.waiting_for_samples_ms / 1e3,
            "stalled_s": stalls["stalled_seconds_total"],
            "stalls": stalls["stalls_total"],
        }

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), _INTERVAL_S)
                self._changed.clear()
            except TimeoutError:
                pass
            if self._agent.fenced.is_set():
                self._controls.fail(FencedError())
            if self._agent.lost.is_set() and self._agent.lost_error is not None:
                self._controls.fail(self._agent.lost_error)
            try:
                await self.refresh()
                await self._check_starved()
                await self._stalls.observe(self.described)
            except RollmeshError as error:
                self._controls.fail(error)
                return
            self._make_room()
            self._report()

    async def _check_starved(self) -> None:
        failed = self.described.counts.failed
        if self._failed_at_step[0] != self._status.steps:
            self._failed_at_step = (self._status.steps, failed)
        lost = failed - self._failed_at_step[1]
        if lost > MAX_DROPPED_BATCHES * self._batch:
            reasons = {k: v for k, v in self.described.counts.reasons.items() if k.startswith("failed/")}
            self._controls.fail(
                StarvedError(
                    f"{lost} groups failed and no batch came together; all failures so far: {reasons}"
                    + await self._frequent_cause(),
                    hint="the generators' logs have every failure; is the reward function or the agent right?",
                )
            )

    async def _frequent_cause(self) -> str:
        """The most frequent cause among members of the latest failed groups."""
        failed = (await self._client.ledger(TRAIN, FAILED_EXAMINED)).failed
        causes = Counter(cause for group in failed for cause in group.causes if cause)
        return f"; mostly: {causes.most_common(1)[0][0]}" if causes else ""

    def _make_room(self) -> None:
        """Asks for a checkpoint where used groups fill the buffer until their commit, so that none can become ready."""
        counts = self.described.counts
        stuck = counts.pending and counts.consumed and not counts.generating and not counts.ready
        asked_at, answer = self._relief
        refused = answer is not None and answer.done() and answer.exception() is not None
        if stuck and self._status.phase == "waiting_for_groups" and (asked_at != self._status.steps or refused):
            self._relief = self._status.steps, self._controls.request_checkpoint()

    def _report(self) -> None:
        status = self._status
        reason = status.waiting_reason or (self.described.learner_waits if status.phase == "waiting_for_groups" else "")
        now = asyncio.get_running_loop().time()
        if not reason:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now - _WAIT_LOG_S + 5.0  # the first line after five seconds
        elif now - self._waiting_since > _WAIT_LOG_S:
            self._waiting_since = now
            log.info("%s", reason)
        reason = reason or self._phase_reason(now)
        gauges = {name: status.last_metrics[name] for name in _GAUGES if name in status.last_metrics}
        gauges["steps"] = float(status.steps)
        gauges["rss_bytes"] = float(self._process.memory_info().rss)
        gauges[f"phase/{status.phase}"] = 1.0
        stale_phases = {f"phase/{name}": 0.0 for name in _PHASES if name != status.phase}
        stalls = self._stalls.gauges()
        reported = {**gauges, **stale_phases, **stalls}
        self.metrics.update(status.last_metrics, steps=status.steps, phase=status.phase, stalls=stalls)
        self._agent.set_status(serving=status.published, gauges=reported, wait=Wait(reason))

    def _phase_reason(self, now: float) -> str:
        """The phase that takes long, with its seconds; waits for groups have reasons of their own."""
        present = (self._status.phase, self._status.steps)
        if present != self._phase:
            self._phase, self._phase_since = present, now
        lasted = now - self._phase_since
        return f"{self._status.phase} for {lasted:.0f} s" if lasted > _LONG_PHASE_S else ""


_GAUGES = (
    "critic/score/mean",
    "eval/reward",
    "tokens_per_second",
    "staleness/mean",
    "actor/loss",
    "response_length/mean",
)
_PHASES = get_args(Phase)
