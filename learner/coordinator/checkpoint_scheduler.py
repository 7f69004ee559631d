"""The schedule of checkpoints: when one is written, its commit, and the removal of those that it replaces.

Invariants: a checkpoint is committed to the buffer only when it is whole on disk. None is removed before a newer one
was committed, so that the one the buffer names exists at every moment. A checkpoint that could not be committed is
found on disk by the successor. An evaluated version whose step changed the weights gets its checkpoint before the next
step: it may turn out to be the best one.
"""

from __future__ import annotations

import time
from pathlib import Path

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint.retention import prune
from rollmesh.learner.coordinator.best_tracker import BestTracker
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.runtime import LearnerRuntime
from rollmesh.learner.coordinator.version_announcer import VersionAnnouncer
from rollmesh.mesh.config.evaluation import CheckpointSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Longest commit; its client repeats the call for less than this.
_COMMIT_S = 180.0


class CheckpointScheduler:
    """Writes checkpoints from the training thread.

    Args:
        runtime: of rank 0; all ranks write, each its part.
        client: commits written checkpoints.
        section: how often.
        progress: stored with every checkpoint; the version from which it was resumed is durable already.
        announcer: of the versions, all of which have to be in force before a checkpoint.
        best: keeps the best one; None: nothing is kept for its result.
    """

    def __init__(
        self,
        runtime: LearnerRuntime,
        client: BufferClient,
        section: CheckpointSection,
        progress: RunProgress,
        announcer: VersionAnnouncer,
        best: BestTracker | None,
    ) -> None:
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._controls = runtime.controls
        self._status = runtime.status
        self._client = client
        self._section = section
        self._progress = progress
        self._announcer = announcer
        self._best = best
        self._written: tuple[int, Path | None] = (progress.resumed_at, None)
        self._written_at = time.monotonic()
        self._requested = False

    def request(self) -> None:
        """Has a checkpoint written at the next occasion; may be called from any thread."""
        self._requested = True

    def write_if_due(self, version: int, *, changed: bool) -> float:
        """Writes a checkpoint where steps, seconds, the buffer or an evaluation say so; returns the seconds it took.

        Args:
            version: in force.
            changed: its weights differ from those of the version before. Otherwise only the buffer's request counts:
                weights that cannot be trained any more do not take the place of those that could.
        """
        section = self._section
        by_steps = section.every_steps is not None and version - self._written[0] >= section.every_steps
        by_time = section.every_s is not None and time.monotonic() - self._written_at >= section.every_s
        began = time.monotonic()
        evaluated = self._best is not None and self._announcer.is_evaluated(version)
        due = changed and (by_steps or by_time or evaluated)
        if not due and not self._requested:
            return 0.0
        self.write(version)
        return time.monotonic() - began

    def serve_requests(self, version: int) -> None:
        """Answers requests for a checkpoint."""
        requests = self._controls.pop_checkpoint_requests()
        if requests:
            folder = self.write(version)
            for request in requests:
                request.set_result((folder, version))

    def write_uncommitted(self, version: int, *, at_step_boundary: bool) -> str:
        """Writes a checkpoint that cannot be committed; returns a sentence about where the next start continues.

        The next learner finds it on the disk, and commits it for this one (`learner.coordinator.takeover`).

        Args:
            version: the last that was trained.
            at_step_boundary: no step has begun since; else it is too late.
        """
        durable, _ = self._written
        if version == durable:
            return f"the next start continues from version {version}"
        lost = f"steps {durable + 1} to {version} are undone at the next start"
        if not at_step_boundary:
            return lost
        try:
            folder = self._save(version)
        except DataError as error:
            return f"{error.message}; {lost}"
        return f"the next start continues from {folder.name}"

    def write(self, version: int) -> Path:
        """Writes and commits a checkpoint; one of this version is not written twice.

        Raises:
            FencedError: another learner has taken over; the checkpoint stays, but `latest` does not name it.
        """
        written_version, folder = self._written
        if folder is None or written_version != version:
            before, self._status.phase = self._status.phase, "checkpointing"
            self._announcer.wait_in_force()
            folder = self._save(version)
            self._status.durable = (version, str(folder.resolve()))
            self._bridge.call(
                self._client.commit(TRAIN, self._progress.incarnation, version, checkpoint=self._status.durable[1]),
                _COMMIT_S,
            )
            self._status.committed = version
            self._written = (version, folder)
            prune(folder.parent, committed=folder.name, keep=self._section.keep)
            self._status.phase = before
        if self._best is not None and self._announcer.is_evaluated(version):
            self._best.checkpoint_written(self._policy(version), folder.name)
        self._written_at = time.monotonic()
        self._requested = False
        return folder

    def _save(self, version: int) -> Path:
        return self._ranks.save(self._policy(version), self._progress.to_wire())

    def _policy(self, version: int) -> PolicyVersion:
        return PolicyVersion(self._progress.incarnation, version)
