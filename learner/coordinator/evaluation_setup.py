"""The parts of the evaluation of one learner and their wiring: rounds, their files, the best checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint.best import BestCheckpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.coordinator.best_tracker import BestTracker
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.step_recorder import StepRecorder
from rollmesh.learner.evaluation.evaluator import Evaluator, RoundRules
from rollmesh.learner.evaluation.measurement_identity import measured_by, measurement
from rollmesh.learner.evaluation.result import EvalResult
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.learner.metrics.run_totals import RunTotals
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import Config
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """The parts of the evaluation that the coordinator uses.

    Attributes:
        evaluator: None without held-out data.
        best: None where no best checkpoint is kept.
    """

    evaluator: Evaluator | None = None
    best: BestTracker | None = None


class _Results:
    """Stores results in the run folder, passes them to the tracker of the best checkpoint, and records them."""

    def __init__(
        self, log: ResultLog, best: BestTracker | None, recorder: StepRecorder, totals: RunTotals, config: Config
    ) -> None:
        self._log = log
        self._measurement = measurement(config)
        self._best = best
        self._recorder = recorder
        self._totals = totals
        self._keep_rows = config.eval.keep_rows

    def store_result(self, result: EvalResult) -> None:
        moment = {"wall_s": self._totals.elapsed_s, "time": time.time()}
        entry = {**result.summary(), **moment, "measurement": self._measurement}
        self._log.write(entry, result.rows[: self._keep_rows])
        if self._best is not None:
            self._best.round_finished(result)

    def round_finished(self, result: EvalResult) -> None:
        self._recorder.record_evaluation(result)

    def round_abandoned(self, policy: PolicyVersion) -> None:
        if self._best is not None:
            self._best.round_abandoned(policy)


def build_evaluation(
    config: Config,
    client: BufferClient,
    tasks: Sequence[trajectory_pb2.PromptTask] | None,
    tokenizer: PreTrainedTokenizerBase,
    progress: RunProgress,
    recorder: StepRecorder,
    status: LearnerStatus,
) -> EvaluationParts:
    """Builds the parts; results that are in the run folder and not in the checkpoint come back into the totals.

    Results that were measured otherwise stay out of them: comparisons begin at this learner's first version.

    Args:
        config: of the run.
        client: of the buffer.
        tasks: of a round; None without held-out data.
        tokenizer: of the model.
        progress: its totals get the results.
        recorder: of results.
        status: says which version is in force.

    Raises:
        FencedError: another learner has taken over.
        DataError: the file about the best checkpoint cannot be read.
    """
    if tasks is None:
        return EvaluationParts()
    lineage, totals, incarnation = progress.lineage, progress.totals, progress.incarnation
    same = measured_by(config)
    log = ResultLog(config.run.folder)
    known = {(found["incarnation"], found["version"]): found for found in (*totals.evals, *log.results())}
    totals.evals = [
        known[name]
        for name in sorted(known)
        if lineage.is_ancestor(PolicyVersion(*name)) and name[0] < incarnation and known[name]["measured_by"] == same
    ]
    best = None
    if config.checkpoint.best:
        file = BestCheckpoint(config.run.folder / CHECKPOINTS_NAME, incarnation)
        file.claim()
        best = BestTracker(file, metric=config.eval.metric, direction=config.eval.direction)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    evaluator = Evaluator(
        client,
        tasks,
        RoundRules(incarnation, timeout_s=config.eval.timeout_s, right_at=config.eval.right_at, measured_by=same),
        decode,
        status,
        _Results(log, best, recorder, totals, config),
    )
    return EvaluationParts(evaluator, best)
