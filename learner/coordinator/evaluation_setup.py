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
from rollmesh.learner.coordinator.step_recorder import StepRecorder
from rollmesh.learner.evaluation.evaluator import EvalResult, Evaluator
from rollmesh.learner.evaluation.measurement_identity import measured_by
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.learner.metrics.run_totals import RunTotals
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import Config
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationParts:
    """What the leader needs of it.

    Attributes:
        evaluator: None without held-out data.
        best: None where no best checkpoint is kept.
    """

    evaluator: Evaluator | None = None
    best: BestTracker | None = None


def build_evaluation(
    config: Config,
    client: BufferClient,
    tasks: Sequence[trajectory_pb2.PromptTask] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lineage: Lineage,
    recorder: StepRecorder,
    run_totals: RunTotals,
    status: LearnerStatus,
) -> EvaluationParts:
    """Builds the parts; results that are in the run folder and not in the checkpoint come back into the totals.

    Results that were measured otherwise stay out of them: what there is to compare with begins at this learner's
    first version.

    Args:
        config: of the run.
        client: of the buffer.
        tasks: of a round; None without held-out data.
        tokenizer: of the model.
        lineage: of this learner, the present incarnation last.
        recorder, run_totals: keep the books.
        status: says which version is in force.

    Raises:
        FencedError: another learner has taken over.
        DataError: the file about the best checkpoint cannot be read.
    """
    if tasks is None:
        return EvaluationParts()
    same = measured_by(config)
    log, incarnation = ResultLog(config.run.folder), lineage.resumed[-1][0]
    known = {(found["incarnation"], found["version"]): found for found in (*run_totals.evals, *log.results())}
    run_totals.evals = [
        known[name]
        for name in sorted(known)
        if lineage.holds(PolicyVersion(*name)) and name[0] < incarnation and known[name]["measured_by"] == same
    ]
    best = None
    if config.checkpoint.best:
        file = BestCheckpoint(config.run.folder / CHECKPOINTS_NAME, incarnation)
        file.claim()
        best = BestTracker(file, metric=config.eval.metric, direction=config.eval.direction)

    def keep(result: EvalResult) -> None:
        entry = {**result.summary(), "wall_s": run_totals.elapsed_s, "time": time.time()}
        log.write(entry, result.rows[: config.eval.keep_rows])
        if best is not None:
            best.round_finished(result)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def missed(policy: PolicyVersion) -> None:
        if best is not None:
            best.round_abandoned(policy)

    evaluator = Evaluator(
        client,
        tasks,
        incarnation=incarnation,
        timeout_s=config.eval.timeout_s,
        right_at=config.eval.right_at,
        decode=decode,
        measured_by=same,
        keep=keep,
        in_force=lambda: status.published,
        on_result=recorder.record_evaluation,
        on_missed=missed,
    )
    return EvaluationParts(evaluator, best)
