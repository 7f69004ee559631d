"""The takeover of a run: the last checkpoint is loaded, then the old learner is fenced.

Invariants: a learner that cannot continue the run takes nothing over. The buffer knows the groups that the last learner
has used before anything else is asked of it. Where Redis has lost state, their use is reported again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.best import protected_names
from rollmesh.learner.checkpoint.fallbacks import fallback_hint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, version_of
from rollmesh.learner.checkpoint.store import DamagedCheckpointError
from rollmesh.learner.coordinator.mesh_session import MeshSession
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.metrics.batch_traces import record_inherited
from rollmesh.learner.recovery.redis_recovery import RunHistory, read_history
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError, LostStateError
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
# Redis may be restarted while a learner starts.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class TakeoverResult:
    """A run that is this learner's.

    Attributes:
        progress: from where it continues.
        takeovers: the version from which each incarnation continued the run, as far as it is known.
        cursor: ordinal of the last prompt task that was seeded.
    """

    progress: RunProgress
    takeovers: Mapping[int, int]
    cursor: int


class RunTakeover:
    """Takes the run of a configuration over.

    Args:
        config: of the run.
        session: open.
        runtime: of rank 0.
        patience_s: longest answer of the buffer.
    """

    def __init__(self, config: Config, session: MeshSession, runtime: LearnerRuntime, *, patience_s: float) -> None:
        self._folder = config.run.folder
        self._commits_steps = config.buffer.commit == "step"
        self._session = session
        self._bridge = runtime.bridge
        self._ranks = runtime.ranks
        self._status = runtime.status
        self._patience_s = patience_s
        self._history: RunHistory | None = None

    def take_over(self, start_from: Path | None, *, takeover: bool) -> TakeoverResult:
        """Loads the last checkpoint and becomes the learner of the run.

        Args:
            start_from: another checkpoint, which becomes the last one.
            takeover: also where another learner's lease has not ended.

        Raises:
            RollmeshError: the run cannot be continued, or another learner holds it.
        """
        # A named checkpoint undoes all commits since. Commits per step run ahead of the checkpoints by design. Either
        # way the groups in between are trained at most once.
        force = start_from is not None or self._commits_steps
        self._history = read_history(self._folder)
        # Otherwise the first checkpoint would end the run when it asks which ones it must not remove.
        protected_names(self._folder / CHECKPOINTS_NAME)
        self._check_survives(start_from)
        for _ in range(_TRIES):
            described = self._bridge.call(self._session.monitor.refresh(), self._patience_s)
            known = described.policy.incarnation
            if self._history is not None and self._history.incarnation > known:
                self._bridge.call(self._session.recover_for(self._history), 2 * self._patience_s)
                continue
            folder, uncommitted = (
                self._checkpoint(described) if start_from is None else (str(start_from.resolve()), False)
            )
            extra = self._load(folder)
            version = int(extra.get("version", 0))
            self._status.durable = (version, folder)
            if uncommitted:
                # Here, for only a checkpoint that loads makes its steps durable. A Redis that may have lost state gets
                # it with the whole history.
                with contextlib.suppress(LostStateError):
                    self._commit(known, version, folder)
                    if self._history is not None:
                        since = described.committed_version
                        record_inherited(self._session.tracer, self._history.uses, since, version)
            try:
                incarnation, seeded = self._bridge.call(
                    self._session.take_over(version, takeover=takeover, force=force), self._patience_s
                )
                if start_from is not None:
                    self._commit(incarnation, version, folder)
            except LostStateError:
                nothing = RunHistory(known, {}, [], 0, 0, "")
                last = dataclasses.replace(self._history or nothing, incarnation=known)
                self._bridge.call(self._session.recover_for(last), 2 * self._patience_s)
                continue
            progress = RunProgress.resume(extra, incarnation, version)
            before = self._history.takeovers if self._history is not None else {}
            return TakeoverResult(progress, {**before, **dict(progress.lineage.resumed)}, seeded)
        raise LostStateError(f"Redis has lost state {_TRIES} times", hint="see the log of Redis, and its disk")

    def _check_survives(self, start_from: Path | None) -> None:
        chosen = version_of(start_from.name) if start_from is not None else None
        if start_from is not None and chosen is not None and not self._survives()(chosen):
            raise DataError(
                f"checkpoint {start_from.name} is of steps that were undone, and their groups may be trained since",
                hint="choose another one: `rollmesh evals RUN` and RUN/checkpoints say which there are",
            )

    def _checkpoint(self, described: buffer_pb2.DescribeResponse) -> tuple[str, bool]:
        """The last checkpoint, and whether the last learner could not commit it any more.

        It includes everything that was claimed before it.
        """
        history = self._history
        if history is None or not history.lacks_checkpoint(described):
            return described.latest_checkpoint, False
        return history.checkpoint, True

    def _commit(self, incarnation: int, version: int, folder: str) -> None:
        commit = self._session.client.commit(TRAIN, incarnation, version, checkpoint=folder)
        self._bridge.call(commit, self._patience_s)

    def _load(self, name: str) -> dict[str, Any]:
        """Loads a checkpoint; nothing where there is no name, since the run is new."""
        if not name:
            return {}
        folder = Path(name)
        if not folder.is_dir():
            raise DataError(
                f"the run's checkpoint {folder} is not here",
                hint=f"start the learner where the run folder is; {fallback_hint(folder, self._survives())}",
            )
        log.info("continuing from %s", folder)
        try:
            return self._ranks.load(folder)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(error.message, hint=fallback_hint(folder, self._survives())) from error

    def _survives(self) -> Callable[[PolicyVersion], bool]:
        return self._history.survives if self._history is not None else _all_survive


def _all_survive(_version: PolicyVersion) -> bool:
    """Every version survives in a run without a history."""
    return True
