"""The schedule of checkpoints: when one is begun, its commit, and the removal of those that it replaces.

The training thread stands still only while the state is copied. The files are written meanwhile, and a thread of rank 0
commits the checkpoint, at which time the training may be versions further.

Invariants: a checkpoint is committed to the buffer only when it is whole on disk. None is removed before a newer one
was committed, so that the one the buffer names exists at every moment. A checkpoint that could not be committed is
found on disk by the successor. An evaluated version gets its checkpoint before the next step, for it may turn out to be
the best one. It gets none where one of its roles could not be trained, or no role was. One checkpoint is written at a
time. Those of evaluated versions and of `every_steps` wait for the one before, and the training with them. Those that
are due by time or on request are begun after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollmesh.learner.callbacks.interface import NO_CALLBACKS, CommittedCheckpoint, EventSink
from rollmesh.learner.checkpoint.copy_thread import CopyThread
from rollmesh.learner.checkpoint.deadlines import COMMIT_S, WAIT_S, WRITE_S
from rollmesh.learner.checkpoint.retention import prune
from rollmesh.learner.checkpoint.store import UnwrittenCheckpointError
from rollmesh.learner.checkpoint.write_pace import WritePace
from rollmesh.learner.coordinator.best_tracker import BestTracker
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.version_announcer import VersionAnnouncer
from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.placement.turns import Turns
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.mesh.config.evaluation import CheckpointSection
from rollmesh.mesh.errors import RollmeshError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_FAILED = 3
"""Checkpoints in a row that a disk may refuse before the run ends with the error."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointWrite:
    """A checkpoint that is being written.

    Attributes:
        policy: its version.
        evaluated: it may become the best one.
        scheduled: the configuration asked for it, and no request.
        began: by the monotonic clock.
        files: the folder, once it is whole on disk.
        committed: the folder, once the buffer knows it.
    """

    policy: PolicyVersion
    evaluated: bool
    scheduled: bool
    began: float
    files: Future[Path]
    committed: Future[Path]


class CheckpointScheduler:
    """Has checkpoints written; called by the training thread.

    Args:
        runtime: of rank 0; all ranks write, each its part.
        section: how often.
        progress: stored with every checkpoint; the version from which it was resumed is durable already.
        announcer: of the versions; commits.
        best: keeps the best one; None: nothing is kept for its result.
        turns: on the devices, which have the state that is written.
        copies: of checkpoints elsewhere; None without copies.
        callbacks: hear of committed checkpoints.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        section: CheckpointSection,
        progress: RunProgress,
        announcer: VersionAnnouncer,
        best: BestTracker | None,
        turns: Turns,
        copies: CopyThread | None = None,
        callbacks: EventSink = NO_CALLBACKS,
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._controls = runtime.controls
        self._status = runtime.status
        self._section = section
        self._progress = progress
        self._announcer = announcer
        self._best = best
        self._turns = turns
        self._copies = copies
        self._callbacks = callbacks
        self._thread = ThreadPoolExecutor(1, "commit")
        self._ending = threading.Event()
        self._writing: CheckpointWrite | None = None
        # The last that was committed; no folder: by an earlier learner.
        self._committed: tuple[int, Path | None] = (progress.resumed_at, None)
        self._begun = (progress.resumed_at, time.monotonic())
        self._requests: list[Future[tuple[Path, int]]] = []
        self._requested = False
        self._failed = self._all_failed = 0
        self._write_s: float | None = None
        # Seconds of the checkpoint that was committed last, perhaps not collected yet.
        self._took_s = 0.0
        self._pace = WritePace(time.monotonic())

    def request(self) -> None:
        """Has a checkpoint written at the next occasion; may be called from any thread."""
        self._requested = True

    def write_if_due(self, version: int, *, healthy: bool) -> float:
        """Begins a checkpoint where steps, seconds, the buffer or an evaluation demand one.

        Args:
            version: published last.
            healthy: its batch trained something, and no role's last gradients were all skipped. Otherwise only the
                buffer's request counts: weights that cannot be trained any more do not take the place of those that
                could.

        Returns:
            Seconds for which the training stood still.

        Raises:
            RollmeshError: the one before could not be committed, or disks refuse one after the other.
        """
        began = time.monotonic()
        self._collect()
        section, (last, last_at) = self._section, self._begun
        by_time = section.every_s is not None and began - last_at >= section.every_s
        if healthy and (self._is_evaluated(version) or _is_over(section.every_steps, version - last)):
            self._pace.due(began)
            self._wait()
            self._begin(version, scheduled=True)
        elif ((healthy and by_time) or self._requested) and self._writing is None:
            if healthy and by_time:
                self._pace.due(began)
            self._begin(version, scheduled=healthy and by_time)
        return time.monotonic() - began

    def serve_requests(self, version: int) -> None:
        """Begins a checkpoint where one is asked for; requests are answered once it is committed.

        Raises:
            RollmeshError: as `write_if_due`.
        """
        self._collect()
        # A caller that has gone asks for nothing.
        asked = self._controls.pop_checkpoint_requests()
        self._requests += [request for request in asked if request.set_running_or_notify_cancel()]
        if self._writing is None and (self._requests or self._requested):
            self._begin(version)
        if self._writing is None or self._writing.policy.version == version:
            for request in self._requests:
                self._answer(request, version)
            self._requests = []

    def metrics(self) -> dict[str, float]:
        """Seconds that the last checkpoint took to be committed; how many of them, and of copies, were refused."""
        if self._write_s is None and not self._all_failed:
            return {}
        written = {} if self._write_s is None else {"checkpoint/write_s": self._write_s}
        copied = {} if self._copies is None else {"checkpoint/copies_failed": self._copies.failed}
        return {**written, **copied, "checkpoint/failed": self._all_failed}

    def write(self, version: int) -> Path:
        """Writes and commits a checkpoint; one of this version is not written twice.

        Raises:
            FencedError: another learner has taken over; the checkpoint stays, but `latest` does not name it.
            UnwrittenCheckpointError: a disk refuses it.
        """
        self._wait()
        if not self._has(version):
            self._begin(version)
            self._wait(last_try=True)
        _, folder = self._committed
        assert folder is not None
        if self._best is not None and self._is_evaluated(version):
            self._best.checkpoint_written(self._policy(version), folder.name)
        return folder

    def write_uncommitted(self, version: int, *, at_step_boundary: bool) -> str:
        """Writes a checkpoint that cannot be committed; returns a sentence about where the next start continues.

        The next learner finds it on the disk, and commits it for this one (`learner.coordinator.takeover`).

        Args:
            version: the last that was trained.
            at_step_boundary: no step has begun since; else it is too late.
        """
        self._ending.set()
        durable = self._committed[0]
        try:
            if self._writing is not None:
                self._await(self._writing.files).result()
                durable = self._writing.policy.version
            if version != durable and at_step_boundary:
                self._turns.require("the last checkpoint", last=True)
                begun = self._ranks.begin_checkpoint(self._policy(version), self._progress.to_wire())
                return f"the next start continues from {self._await(begun).result().name}"
        except (RollmeshError, RuntimeError) as error:
            return f"{getattr(error, 'message', error)}; steps {durable + 1} to {version} are undone at the next start"
        if version == durable:
            return f"the next start continues from version {version}"
        return f"steps {durable + 1} to {version} are undone at the next start"

    def wait_for_copies(self) -> None:
        """Waits until the copies are as the folder is, or could not be brought up to date."""
        if self._copies is None:
            return
        before, self._status.phase = self._status.phase, "checkpointing"
        now = time.time()
        since, until = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (now, now + WRITE_S))
        self._status.waiting_reason = f"copies checkpoints to {self._copies.url} since {since}, until {until} at most"
        try:
            self._await(self._copies.start(), WRITE_S)
        except UnwrittenCheckpointError:
            log.warning("%s may lack the last checkpoints: not up to date after %.0f s", self._copies.url, WRITE_S)
        finally:
            self._status.waiting_reason = ""
            self._status.phase = before

    def close(self) -> None:
        """Commits nothing more: a checkpoint that is still being written is left to the next learner."""
        self._ending.set()
        self._thread.shutdown(wait=False)

    def _begin(self, version: int, *, scheduled: bool = False) -> None:
        self._requested = False
        if self._has(version):
            return
        before, self._status.phase = self._status.phase, "checkpointing"
        began = time.monotonic()
        evaluated = self._is_evaluated(version)
        self._turns.require("a checkpoint")
        files = self._ranks.begin_checkpoint(self._policy(version), self._progress.to_wire())
        done: Future[Path] = Future()
        self._writing = CheckpointWrite(self._policy(version), evaluated, scheduled, began, files, done)
        self._thread.submit(self._complete, self._writing, self._controls.wake)
        self._begun = (version, began)
        self._status.phase = before

    def _complete(self, writing: CheckpointWrite, wake: Callable[[], object]) -> None:
        """Commits a checkpoint, in a thread of its own, and ends a wait for groups: the next one may be due."""
        try:
            folder = writing.files.result()
            # Long over where the training waits for this checkpoint: the next version is published after it.
            self._announcer.wait_announced(writing.policy.version)
            if self._ending.is_set():
                raise UnreachableError(f"{folder} is whole, and was not committed: the learner ends")
            commit = self._announcer.commit_checkpoint(writing.policy.version, str(folder.resolve()))
            self._bridge.call(commit, COMMIT_S)
            self._took_s = time.monotonic() - writing.began
            policy = writing.policy
            self._callbacks.emit(CommittedCheckpoint(policy.incarnation, policy.version, folder.resolve()))
            uploading = None if self._copies is None else self._copies.uploading
            prune(folder.parent, committed=folder.name, keep=self._section.keep, uploading=uploading)
            if self._best is not None and writing.evaluated:
                self._best.checkpoint_written(writing.policy, folder.name)
            if self._copies is not None:
                self._copies.start()
            writing.committed.set_result(folder)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            writing.committed.set_exception(error)
        wake()

    def _collect(self, *, last_try: bool = False) -> None:
        """Takes note of a checkpoint that has become one, or of its failure.

        Args:
            last_try: raise the first failure too.
        """
        writing = self._writing
        if writing is None or not writing.committed.done():
            return
        self._writing = None
        version = writing.policy.version
        try:
            folder = writing.committed.result()
        except UnwrittenCheckpointError as error:
            self._failed += 1
            self._all_failed += 1
            if last_try or self._failed == MAX_FAILED:
                raise
            log.warning("%s; the next one is tried when it is due", error.message)
        else:
            log.info("checkpoint %s is committed, %.1f s after its step", folder.name, self._took_s)
            self._failed, self._write_s, self._committed = 0, self._took_s, (version, folder)
            if writing.scheduled:
                self._pace.written(self._took_s)

    def _wait(self, *, last_try: bool = False) -> None:
        """Waits for the checkpoint that is being written."""
        if self._writing is not None:
            before, self._status.phase = self._status.phase, "checkpointing"
            self._await(self._writing.committed)
            self._status.phase = before
        self._collect(last_try=last_try)

    def _await(self, future: Future[T], most_s: float = WAIT_S) -> Future[T]:
        """Waits in turns, so that the other ranks wait too.

        Args:
            future: what is waited for.
            most_s: bound of the wait; by default for a writer that has given up its own.
        """
        if not wait_keeping_alive(self._ranks, future, most_s):
            raise UnwrittenCheckpointError(f"no end after {most_s:.0f} s", hint="check the disk of run.dir")
        return future

    def _answer(self, request: Future[tuple[Path, int]], version: int) -> None:
        if self._writing is None:
            _, folder = self._committed
            assert folder is not None
            request.set_result((folder, version))
            return

        def pass_on(committed: Future[Path]) -> None:
            if (error := committed.exception()) is None:
                request.set_result((committed.result(), version))
            else:
                request.set_exception(error)

        self._writing.committed.add_done_callback(pass_on)

    def _has(self, version: int) -> bool:
        """True where this learner has committed a checkpoint of the version."""
        committed, folder = self._committed
        return folder is not None and committed == version

    def _is_evaluated(self, version: int) -> bool:
        return self._best is not None and self._announcer.is_evaluated(version)

    def _policy(self, version: int) -> PolicyVersion:
        return PolicyVersion(self._progress.incarnation, version)


def _is_over(bound: int | None, steps: int) -> bool:
    return bound is not None and steps >= bound
