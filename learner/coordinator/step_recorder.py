"""Turns finished steps and evaluations into records, kept samples and the run's totals.

The training thread hands over a step and continues; records are computed in the metrics writer's thread.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.learner.callbacks.interface import EvaluationEnd, EventSink, StepEnd
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.distributed.token_values import BatchTokens
from rollmesh.learner.evaluation.result import EvalResult
from rollmesh.learner.metrics.batch_traces import BatchTraces
from rollmesh.learner.metrics.run_totals import peak_rss_bytes
from rollmesh.learner.metrics.sample_log import ChosenSample, SampleLog
from rollmesh.learner.metrics.step_metrics import group_metrics, staleness_histogram, staleness_metrics
from rollmesh.learner.metrics.trackers.interface import numbers
from rollmesh.learner.metrics.writer import MetricsWriter
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.mesh.telemetry.tracing import no_traces


@dataclass(slots=True)
class StepTimings:
    """Durations of the phases of one step in the training thread, in seconds.

    Attributes:
        wait_s: for groups, and screening them.
        prepare_s: planning, and getting the payloads.
        claim_s: until the version is in force and for the claim's answer, beyond what ran concurrently (packing,
            forward and backward).
        train_s: the batch stage, packing, forward, backward and optimizer.
        publish_s: copying the weights; they are published in the background.
        checkpoint_s: copying the state for a checkpoint, and waiting for the one before.
    """

    wait_s: float = 0.0
    prepare_s: float = 0.0
    claim_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def as_metrics(self) -> dict[str, float]:
        """`timing_s/...` metrics, with the whole step; verl's names where it has one."""
        now = time.perf_counter()
        timings = {f"timing_s/{phase}": getattr(self, name) for name, phase in _PHASES.items()}
        return {**timings, "timing_s/step": now - self.began}


_PHASES = {
    "wait_s": "gen",
    "prepare_s": "prepare",
    "claim_s": "claim",
    "train_s": "update_actor",
    "publish_s": "update_weights",
    "checkpoint_s": "save_checkpoint",
}


@dataclass(frozen=True, slots=True, eq=False)
class FinishedStep:
    """A finished step as the training thread knows it.

    Attributes:
        trained_version: the version that was trained; it made the next one.
        groups: the batch.
        dropped: groups given back on the way, by reason.
        metrics: of engine and algorithm.
        skipped: optimizer steps without a finite gradient.
        timings: of the training thread, the speed of the training by role, and checkpoints.
        mismatch_warning: of learner and generators that differ; empty: none is due.
    """

    trained_version: int
    groups: Sequence[SampledGroup]
    dropped: Mapping[str, int]
    metrics: Mapping[str, float]
    skipped: int
    timings: Mapping[str, float]
    mismatch_warning: str = ""


class StepRecorder:
    """Records the steps and evaluations of a run.

    Args:
        writer: takes the records; its thread computes them.
        samples: keeps some responses.
        progress: its totals are updated here, by the training thread (steps) and by results of evaluations.
        status: gets the last metrics.
        callbacks: hear of steps and evaluations.
        table_every: steps from one table of samples in the trackers to the next; 0: none.
        pushes: what generators report of the weights.
        clocks: of waiting and of stalls.
        traces: hear of steps; None: there are none.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        samples: SampleLog,
        progress: RunProgress,
        status: LearnerStatus,
        callbacks: EventSink,
        *,
        table_every: int,
        pushes: PushStatistics,
        clocks: Callable[[], Mapping[str, float]],
        traces: BatchTraces | None = None,
    ) -> None:
        self._writer = writer
        self._samples = samples
        self._totals = progress.totals
        self._lineage = progress.lineage
        self._incarnation = progress.incarnation
        self._status = status
        self._callbacks = callbacks
        self._table_every = table_every
        self._pushes = pushes
        self._clocks = clocks
        self._traces = traces or BatchTraces(no_traces(), progress.incarnation)

    @property
    def eval_reward(self) -> float | None:
        """Held-out reward of the run's last evaluation; None before the first."""
        evals = self._totals.evals
        return float(evals[-1]["reward"]) if evals else None

    def start_clock(self) -> None:
        """Starts the run's clock: the first version of this learner has been published."""
        self._totals.start_clock()

    def record_step(self, finished: FinishedStep, batch_tokens: BatchTokens | None) -> None:
        """Adds a step to the totals; its record is computed in the writer's thread.

        Args:
            finished: the step.
            batch_tokens: their values; of those that are kept the values are copied now. None: they are not known.
        """
        histogram = staleness_histogram(finished.groups, self._lineage, finished.trained_version)
        tokens = sum(histogram.values())
        self._totals.add_step(
            groups=len(finished.groups),
            samples=sum(len(group.scored_members) for group in finished.groups),
            tokens=tokens,
            staleness=histogram,
            wait_s=finished.timings["timing_s/gen"],
        )
        self._status.steps = self._totals.steps
        self._traces.trained(finished.trained_version, finished.groups, finished.timings)
        totals = {
            "wall_s": self._totals.elapsed_s,
            "total/tokens": self._totals.tokens,
            "total/samples": self._totals.samples,
        }
        samples = self._samples.choose(finished.groups, batch_tokens)
        self._writer.submit(
            functools.partial(self._write_record, self._totals.steps, finished, samples, histogram, totals)
        )

    def record_evaluation(self, result: EvalResult) -> None:
        """Adds a finished round to the totals and writes its record."""
        wall_s = self._totals.elapsed_s
        self._totals.evals.append({**result.summary(), "wall_s": wall_s})
        record = {"time": time.time(), "wall_s": wall_s, **result.record()}
        self._writer.log(result.policy.version, record)
        policy = result.policy
        self._callbacks.emit(EvaluationEnd(policy.incarnation, policy.version, result.reward, numbers(record)))

    def _write_record(
        self,
        step: int,
        finished: FinishedStep,
        chosen: Sequence[ChosenSample],
        histogram: Counter[int],
        totals: Mapping[str, float],
    ) -> None:
        pushes = self._pushes.summary()
        tokens, step_s = sum(histogram.values()), finished.timings["timing_s/step"]
        of_groups = group_metrics(finished.groups)
        record: dict[str, Any] = {
            "time": time.time(),
            **totals,
            "version": finished.trained_version + 1,
            "incarnation": self._incarnation,
            **of_groups,
            "tokens": tokens,
            "tokens_per_second": tokens / step_s,
            "perf/throughput": of_groups["perf/total_num_tokens"] / step_s,
            "perf/time_per_step": step_s,
            **{f"dropped/{reason}": count for reason, count in finished.dropped.items()},
            "skipped_updates": finished.skipped,
            **finished.metrics,
            **({"mismatch_warning": finished.mismatch_warning} if finished.mismatch_warning else {}),
            # After the algorithm's metrics, which do not see responses that were skipped for lack of a signal.
            **staleness_metrics(histogram),
            **finished.timings,
            **{f"clock/{name}": value for name, value in self._clocks().items()},
            "push/count": pushes.count,
            "push/errors": pushes.errors,
            **pushes.metrics("push/"),
            "peak_rss_bytes": peak_rss_bytes(),
            **self._writer.lost_records(),
            **self._callbacks.metrics(),
        }
        values = numbers(record)
        reward = self.eval_reward
        self._status.last_metrics = values | ({} if reward is None else {"eval/reward": reward})
        self._writer.write_now(step, record)
        self._callbacks.emit(StepEnd(step, self._incarnation, finished.trained_version + 1, values))
        samples = self._samples.append(
            step, chosen, lambda version: self._lineage.staleness(version, finished.trained_version)
        )
        if samples and self._table_every and step % self._table_every == 0:
            self._writer.write_samples(step, samples)
