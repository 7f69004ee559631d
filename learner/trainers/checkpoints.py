"""Checkpoints of a training: when they are due, and which stay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from rollmesh.learner.checkpoint.retention import prune
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.mesh.config.evaluation import CheckpointPaceSection
from rollmesh.mesh.trajectory.versions import PolicyVersion


class Checkpoints:
    """The checkpoints of a training.

    Args:
        store: writes them.
        root: folder of the store.
        incarnation: of this process's start.
        extra: what each of them says.
        pace: when they are due, and how many stay.
    """

    def __init__(
        self,
        store: CheckpointStore,
        root: Path,
        incarnation: int,
        extra: Mapping[str, object],
        pace: CheckpointPaceSection,
    ) -> None:
        self._store, self._root, self._incarnation = store, root, incarnation
        self._extra, self._pace = dict(extra), pace
        self._last_s = time.monotonic()
        self._writing: Future[Path] | None = None

    def due(self, step: int) -> bool:
        """True where the next checkpoint is to be written after a step; rank 0's clock decides."""
        every_s, every_steps = self._pace.every_s, self._pace.every_steps
        by_time = every_s is not None and time.monotonic() - self._last_s >= every_s
        return by_time or (every_steps is not None and step % every_steps == 0)

    def begin(self, engine: Engine, step: int) -> None:
        """Has a checkpoint written while training continues; collective.

        Raises:
            UnwrittenCheckpointError: in every process, where a disk has refused the one before.
        """
        self.wait()
        self._last_s = time.monotonic()
        version = PolicyVersion(self._incarnation, step)
        self._writing = self._store.begin({ACTOR: engine}, version, {**self._extra, "step": step})
        if engine.layout.leads:
            self._writing.add_done_callback(self._prune)

    def wait(self) -> None:
        """Waits until the last one is durable."""
        if self._writing is not None:
            self._writing.result()

    def _prune(self, written: Future[Path]) -> None:
        if written.exception() is None:
            prune(self._root, committed=written.result().name, keep=self._pace.keep)
