"""Checkpoints of a training: when they are due, which stay, and who hears of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.learner.callbacks.interface import NO_CALLBACKS, CommittedCheckpoint, EventSink
from rollmesh.learner.checkpoint.best import Best
from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.learner.checkpoint.retention import prune
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.trainers.best import BestByMetric
from rollmesh.mesh.config.evaluation import CheckpointPaceSection
from rollmesh.mesh.trajectory.versions import PolicyVersion

_SETTLED_S = 60.0
Request = Future[tuple[Path, int]]


class Checkpoints:
    """The checkpoints of a training.

    Args:
        store: writes them.
        root: folder of the store.
        incarnation: of this process's start.
        extra: what each of them says.
        pace: when they are due, and how many stay.
        last_name: the one from which the training continues; empty without one.
        best: chooses the best one; None: none is, or another rank does.
        controls: has requests for checkpoints.
        events: hears of those that are durable.
    """

    def __init__(
        self,
        store: CheckpointStore,
        root: Path,
        incarnation: int,
        extra: Mapping[str, object],
        pace: CheckpointPaceSection,
        *,
        last_name: str = "",
        best: BestByMetric | None = None,
        controls: ControlRequests | None = None,
        events: EventSink = NO_CALLBACKS,
    ) -> None:
        self._store, self._root, self._incarnation = store, root, incarnation
        self._extra, self._pace, self._best = dict(extra), pace, best
        self._controls, self._events = controls or ControlRequests(), events
        self._last_name, self._last_s = last_name, time.monotonic()
        self._writing: Future[Path] | None = None
        self._settled = threading.Event()
        self._candidate: Best | None = None
        self._requests: list[Request] = []

    @property
    def incarnation(self) -> int:
        """The number of this process's start."""
        return self._incarnation

    @property
    def last_name(self) -> str:
        """The last checkpoint that was begun, or that the training continues from; empty without one."""
        return self._last_name

    def best_name(self) -> str:
        """The best checkpoint, on rank 0; empty without one."""
        return self._best.name if self._best is not None else ""

    def due(self, step: int, record: Mapping[str, Any]) -> bool:
        """True where the next checkpoint is to be written after a step; rank 0 decides.

        Args:
            step: that was trained.
            record: of it; with an evaluation that is better than all before, its checkpoint is due.
        """
        every_s, every_steps = self._pace.every_s, self._pace.every_steps
        self._candidate = None if self._best is None else self._best.better(self._version(step), record)
        self._requests += self._controls.pop_checkpoint_requests()
        by_time = every_s is not None and time.monotonic() - self._last_s >= every_s
        by_step = every_steps is not None and step % every_steps == 0
        return by_time or by_step or self._candidate is not None or bool(self._requests)

    def begin(self, engine: Engine, step: int) -> None:
        """Has a checkpoint written while training continues; collective.

        Raises:
            UnwrittenCheckpointError: in every process, where a disk has refused the one before.
        """
        self.wait()
        self._last_s = time.monotonic()
        self._settled.clear()
        version = self._version(step)
        self._last_name = checkpoint_name(version)
        self._writing = self._store.begin({ACTOR: engine}, version, {**self._extra, "step": step})
        if engine.layout.leads:
            settle = partial(self._settle, version, self._candidate, self._requests)
            self._candidate, self._requests = None, []
            self._writing.add_done_callback(settle)
        else:
            self._settled.set()

    def wait(self) -> None:
        """Waits until the last one is durable, and is told of."""
        if self._writing is not None:
            self._writing.result()
            self._settled.wait(_SETTLED_S)

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self._incarnation, step)

    def _settle(
        self, version: PolicyVersion, candidate: Best | None, requests: list[Request], written: Future[Path]
    ) -> None:
        """Tells everyone of a checkpoint, and removes others; in the thread that has written it."""
        try:
            if (error := written.exception()) is not None:
                for request in requests:
                    request.set_exception(error)
                return
            folder = written.result()
            if candidate is not None and self._best is not None:
                self._best.keep(candidate)
            prune(self._root, committed=folder.name, keep=self._pace.keep)
            self._events.emit(CommittedCheckpoint(version.incarnation, version.version, folder.resolve()))
            for request in requests:
                request.set_result((folder, version.version))
        finally:
            self._settled.set()
