"""Replay: a learner alone trains on recorded batches, without buffer, Redis or generators.

Loop, plan, worker and algorithm are the learner's own. Batches come from the recording, weights are discarded, and one
checkpoint is written at the end. Every step repeats the recorded one bit by bit on the same machine, from the same
start, with the same settings, threads and ranks. With other settings it is an experiment on the same data.

Invariants: the run's own folder is only read; batches are trained in the order of their versions, without gaps.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.builders import build_algorithm, build_engines, build_worker, open_watch, set_learner_threads
from rollmesh.learner.callbacks.interface import NO_CALLBACKS
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.batch_claim import CandidateBatch
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.step_recorder import StepRecorder
from rollmesh.learner.coordinator.training_loop import LoopRules, TrainingLoop
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.rank_group import RankGroup, run_follower
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import PlannedMember
from rollmesh.learner.distributed.trajectories import InlineTrajectories, TrajectoryOrError, TrajectorySource
from rollmesh.learner.engines.interface import ACTOR, STATE_NAME
from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.metrics.files import SAMPLES
from rollmesh.learner.metrics.sample_log import SampleLog
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.placement.turns import OwnDevices
from rollmesh.learner.recording.recording import FOLDER, Recording, decode_groups
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.learner.rollouts.group_filter import filter_groups
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.ranks import check_ranks, choose_interface
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.mesh.trajectory.image_files import image_folder
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of a replay.

    Attributes:
        first, last: versions that were trained, `last` not included.
        reason: why it ended: `steps`, or `end_of_data` where the recording ends.
        folder: of its metrics, samples and last checkpoint.
    """

    first: int
    last: int
    reason: str
    folder: Path


def replay(
    config: Config, recorded: Path, out: Path, *, checkpoint: Path | None = None, steps: int | None = None
) -> ReplayOutcome | None:
    """Trains on the recorded batches of a run.

    Args:
        config: the run's, or with other settings of algorithm and learner.
        recorded: the run's folder.
        out: of the replay; emptied if it holds an earlier one.
        checkpoint: to start from; None: from the model, as the run did.
        steps: batches to train at most; None: all that follow without a gap.

    Returns:
        The outcome; None on ranks above 0.

    Raises:
        DataError: nothing is recorded, or not from that start on; `checkpoint` is no checkpoint.
        ConfigError: the settings do not go together.
    """
    check_ranks(config.security)
    choose_interface(config.learner.distributed.interface)
    if checkpoint is not None and not (checkpoint / STATE_NAME).is_file():
        found = [folder.name for _, folder in CheckpointStore(recorded / CHECKPOINTS_NAME).list()]
        raise DataError(
            f"{checkpoint} is no checkpoint",
            hint=f"{recorded / CHECKPOINTS_NAME} has {', '.join(found) or 'none: replay from the start'}",
        )
    images = image_folder(config)
    run = config.run.model_copy(update={"dir": out.parent, "name": out.name})
    # All models are here: of a role's own processes there are none.
    learner = config.learner.with_all_roles_here()
    config = config.model_copy(update={"model": resolve_model(config.model), "run": run, "learner": learner})
    set_learner_threads(config)
    recording = Recording(recorded / FOLDER)
    algorithm = build_algorithm(config)
    watch = open_watch(config)
    with watch.phase("load models"):
        engines = build_engines(config, algorithm)
    rank = int(os.environ.get("RANK", "0"))
    channel = RankChannel(config.learner.distributed) if engines[ACTOR].layout.processes > 1 else None
    inline = InlineTrajectories()
    payloads: TrajectorySource = inline if rank == 0 else RecordedTrajectories(recording)
    worker = build_worker(config, engines, algorithm, payloads, out / CHECKPOINTS_NAME, images=images)
    try:
        if rank > 0 and channel is not None:
            run_follower(worker, channel, watch)
            return None
        _prepare(out)
        ranks, bridge = RankGroup(worker, channel, watch), AsyncBridge("replay")
        runtime = LearnerRuntime(bridge, ranks, inline, ControlRequests(), LearnerStatus())
        try:
            return _train(config, recording, runtime, algorithm, checkpoint, steps)
        finally:
            bridge.close()
            ranks.shutdown()
    finally:
        with watch, watch.phase("leave"):
            worker.close()


def _prepare(out: Path) -> None:
    """An empty folder.

    Raises:
        DataError: the folder holds something else than an earlier replay.
    """
    mark = out / _MARK
    if out.exists() and any(out.iterdir()):
        if not mark.exists():
            raise DataError(f"{out} is not empty, and not of a replay", hint="give another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()


_MARK = "replay"


def _train(
    config: Config,
    recording: Recording,
    runtime: LearnerRuntime,
    algorithm: Algorithm,
    checkpoint: Path | None,
    steps: int | None,
) -> ReplayOutcome:
    extra = runtime.ranks.load(checkpoint) if checkpoint is not None else {}
    first = int(str(extra.get("version", 0)))
    if (batch := recording.batch(first)) is None:
        raise DataError(
            f"the recording has no batch of version {first}; it begins with version {recording.versions[0]}",
            hint="start from a checkpoint of a version that is recorded (--from-checkpoint)",
        )
    progress = RunProgress.replay(extra, recording.lineage)
    out = config.run.folder
    writer = MetricsWriter(open_trackers(config))
    recorder = StepRecorder(
        writer,
        SampleLog(out / SAMPLES, load_tokenizer(Path(config.model.path)), config.logging),
        progress,
        runtime.status,
        NO_CALLBACKS,
        table_every=config.logging.tables_every_steps,
        pushes=PushStatistics(),
        clocks=dict,
    )
    rules = LoopRules(
        recording.lineage,
        version=first,
        last_version=max(recording.versions) + 1 if steps is None else first + steps,
        planned_end=min(batch.planned_end or config.learner.steps, config.learner.steps),
        batch=config.learner.batch,
        max_skipped=config.learner.max_skipped,
    )
    batches = RecordedBatches(recording, algorithm)
    checkpoints, turns = _NoCheckpoints(), OwnDevices()
    loop = TrainingLoop(runtime, batches, _DiscardWeights(), checkpoints, turns, recorder, algorithm, rules)
    try:
        reason = loop.run()
        last = PolicyVersion(progress.incarnation, loop.version)
        runtime.ranks.begin_checkpoint(last, progress.totals_to_wire()).result()
    finally:
        writer.close()
    log.info("replayed versions %d to %d: %s", first, loop.version, reason)
    return ReplayOutcome(first, loop.version, reason, out)


class RecordedBatches:
    """Batches of a recording in place of the buffer's.

    Args:
        recording: has them.
        algorithm: keeps or drops groups; another one than the recorded may drop some, which are not replaced.
    """

    def __init__(self, recording: Recording, algorithm: Algorithm) -> None:
        self._recording = recording
        self._algorithm = algorithm

    def gather(self, candidate: CandidateBatch, timeout_s: float) -> bool:
        """Fills a candidate with the batch of its version; False without one.

        Raises:
            DataError: the algorithm drops every group of the batch.
        """
        del timeout_s
        batch = self._recording.batch(candidate.version)
        if batch is None:
            if candidate.version < self._recording.versions[-1]:
                log.warning("the batch of version %d was not recorded: the replay ends before it", candidate.version)
            return False
        groups = decode_groups(batch)
        candidate.dropped.update(batch.dropped)
        candidate.groups, dropped = filter_groups(self._algorithm, groups)
        for reason, gone in dropped.items():
            candidate.dropped[reason] += len(gone)
        if not candidate.groups:
            raise DataError(
                f"the algorithm drops every group of version {candidate.version}: {dict(candidate.dropped)}",
                hint="the recording holds only what the run has trained; loosen the filters",
            )
        return True

    def discard(self, candidate: CandidateBatch, unusable: Unusable) -> None:
        """Fails: a recording has no groups to put in their place.

        Raises:
            DataError: always.
        """
        group, why = next(iter(unusable.items()))
        raise DataError(
            f"the recording of version {candidate.version}: group {group}: {why}",
            hint="the recorded file is damaged: replay other versions (--from-checkpoint, --steps)",
        )

    async def claim(self, candidate: CandidateBatch) -> bool:
        """Every recorded batch may be used."""
        del candidate
        return True


class RecordedTrajectories:
    """Trajectories of a recording for the ranks above 0: batch by batch, as they are trained.

    Args:
        recording: has them.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._versions = list(recording.versions)
        self._batch_trajectories: dict[tuple[str, int], Trajectory] = {}

    def get(self, members: Sequence[PlannedMember]) -> Sequence[TrajectoryOrError]:
        """The trajectories of `members`, in their order."""
        names = [(member.group_id, member.member) for member in members]
        while self._versions and not all(name in self._batch_trajectories for name in names):
            batch = self._recording.batch(self._versions.pop(0))
            groups = decode_groups(batch) if batch is not None else []
            self._batch_trajectories = {name: found for group in groups for name, found in _trajectories(group)}
        gone = DataError("the recording lacks a trajectory that the plan names", hint="is it the same folder?")
        return [self._batch_trajectories.get(name, gone) for name in names]


def _trajectories(group: SampledGroup) -> Iterable[tuple[tuple[str, int], Trajectory]]:
    for member in group.members:
        if member.trajectory is not None:
            yield (group.group_id, member.meta.member), member.trajectory


class _DiscardWeights:
    """Publishes nothing: a replay has no generators."""

    def publish(self, version: int, *, changed: bool) -> None:
        """Does nothing."""

    def wait_in_force(self) -> None:
        """Returns at once."""

    async def in_force(self) -> None:
        """Returns at once."""


class _NoCheckpoints:
    """Writes no checkpoints: only the end of a replay is kept."""

    def serve_requests(self, version: int) -> None:
        """Does nothing: there are no requests."""

    def write_if_due(self, version: int, *, healthy: bool) -> float:
        """Writes nothing."""
        del version, healthy
        return 0.0

    def metrics(self) -> dict[str, float]:
        """No metrics: a replay writes no checkpoints."""
        return {}
