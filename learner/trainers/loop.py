"""The training loop: one batch of rows after another, with evaluations and checkpoints between them.

Invariants: the rows of a step depend on the data, the seed and the step's number alone. So a run that continues trains
what it would have trained. Every process runs the loop, and rank 0 alone decides when a checkpoint is due and
whether the training ends early. A checkpoint names the step that it contains. None is
written before a step had a finite loss and gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from rollmesh.learner.control_requests import REQUEST, ControlRequests
from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.learner.distributed.step_meter import StepMeter
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.example_loader import ExampleLoader, Examples
from rollmesh.learner.trainers.finite_steps import FiniteSteps
from rollmesh.learner.trainers.held_out import evaluate
from rollmesh.learner.trainers.rows import OrderedRows
from rollmesh.learner.trainers.step_batch import StepBatch, build_batch
from rollmesh.learner.trainers.step_loss import StepLoss

Report = Callable[[int, Mapping[str, Any]], object]


class _Stop(IntEnum):
    """Reasons to end before the last step; of several the highest counts."""

    NONE = 0
    DONE = 1
    INTERRUPTED = 2


@dataclass(frozen=True, slots=True)
class LoopRules:
    """Sizes of a training.

    Attributes:
        steps: optimizer steps of the whole run.
        rows: per step, over all ranks.
        token_budget: per micro-batch.
        max_skipped: steps in a row without a finite gradient that the run outlives.
        eval_every: steps between evaluations; None: at the end alone.
    """

    steps: int
    rows: int
    token_budget: int
    max_skipped: int = 10
    eval_every: int | None = None


class TrainingLoop:
    """Trains one model on rows.

    Args:
        engine: of this rank.
        loss: that is trained.
        loader: of examples.
        train: rows to train on.
        rules: sizes.
        report: takes the record of each step, on rank 0.
        held_out: rows to evaluate on, by source; empty: there are none.
        checkpoints: None: none are written.
        controls: of rank 0, which asks it to end early.
    """

    def __init__(
        self,
        engine: Engine,
        loss: StepLoss,
        loader: ExampleLoader,
        train: OrderedRows,
        rules: LoopRules,
        report: Report,
        *,
        held_out: Mapping[str, OrderedRows] = MappingProxyType({}),
        checkpoints: Checkpoints | None = None,
        controls: ControlRequests | None = None,
    ) -> None:
        self._engine, self._loss, self._loader = engine, loss, loader
        self._train, self._held_out, self._rules = train, held_out, rules
        self._report, self._checkpoints, self._controls = report, checkpoints, controls or ControlRequests()
        self._limit = SkipLimit(rules.max_skipped)
        self._finite = FiniteSteps()

    def run(self, start: int = 0) -> bool:
        """Trains from a step on, which counts from 0; False: interrupted before the last one.

        A request of the user's code ends it too, but the training is complete then.

        Raises:
            DivergedError: gradients were not finite in too many steps in a row, or no step of a complete training had a
                finite loss and gradient.
        """
        rules, self._finite = self._rules, FiniteSteps(before=start > 0)
        if start >= rules.steps:
            return True
        ahead = self._load(self._train, start)
        for step in range(start, rules.steps):
            began, examples = time.perf_counter(), self._take(self._train, step, ahead)
            if step + 1 < rules.steps:
                ahead = self._load(self._train, step + 1)
            record = self._step(step, examples, began)
            done = step + 1
            if self._held_out and (done == rules.steps or _divides(rules.eval_every, done)):
                record |= evaluate(self._engine, self._loss, self._held_out, rules.rows, self._batch_of)
            if self._engine.layout.leads:
                self._report(done, record)
            stop = self._end_step(done, record)
            if stop is not _Stop.NONE and done < rules.steps:
                return stop is _Stop.DONE
        return True

    def _load(self, rows: OrderedRows, step: int) -> Future[Examples]:
        return self._loader.begin(rows.source, rows.of_step(step, self._rules.rows))

    def _take(self, rows: OrderedRows, step: int, loading: Future[Examples]) -> Examples:
        return rows.complete(step, self._rules.rows, self._loader.take(loading))

    def _batch_of(self, rows: OrderedRows, step: int) -> StepBatch:
        return self._batch(self._take(rows, step, self._load(rows, step)))

    def _batch(self, examples: Examples) -> StepBatch:
        budget = self._rules.token_budget
        return build_batch(self._loss.begin(self._engine, examples, budget), self._engine, budget)

    def _step(self, step: int, examples: Examples, began: float) -> dict[str, Any]:
        """One optimizer step; gives its record."""
        engine = self._engine
        batch = self._batch(examples)
        meter = StepMeter({ACTOR: engine})
        with meter.timing("update", ACTOR):
            engine.accumulate(batch.micro_batches, self._loss, batch.counts)
            result = engine.apply(RunStep(step, self._rules.steps))
        self._finite.record(result)
        if result.metrics:
            self._limit.record(step + 1, {ACTOR: result.skipped})
        meter.count_update(ACTOR, batch.micro_batches)
        measured = meter.metrics()
        seconds = time.perf_counter() - began
        return {
            "time": time.time(),
            "epoch": min((step + 1) * self._rules.rows, self._train.order.last_ordinal or 1 << 62)
            / self._train.order.rows,
            **{f"{ACTOR}/{name}" if "/" not in name else name: value for name, value in result.metrics.items()},
            "skipped_updates": int(result.skipped),
            "samples": batch.rows,
            "skipped_rows": batch.skipped,
            "tokens": batch.counts.tokens,
            "perf/total_num_tokens": batch.tokens,
            "perf/throughput": batch.tokens / seconds,
            "tokens_per_second": batch.counts.tokens / seconds,
            "timing_s/step": seconds,
            **measured,
        }

    def _end_step(self, step: int, record: Mapping[str, Any]) -> _Stop:
        """Writes a checkpoint where one is due, and at the end; says whether the training ends. Collective.

        There is none before the first finite step; those that were asked for are written after it.
        """
        asked = self._asked()
        due = self._checkpoints is not None and self._engine.layout.leads and self._checkpoints.due(step, record)
        stop, save = self._engine.world.max_ints([int(asked), int(due)] if self._engine.layout.leads else [0, 0])
        if self._finite.missing:
            # No checkpoint: a run that continues from one takes it that there was a finite step.
            if stop == _Stop.DONE or step == self._rules.steps:
                self._finite.check_end()
            return _Stop(stop)
        last = stop != _Stop.NONE or step == self._rules.steps
        if self._checkpoints is not None and (save or last):
            self._checkpoints.begin(self._engine, step)
            if last:
                self._checkpoints.wait()
        return _Stop(stop)

    def _asked(self) -> _Stop:
        if self._controls.error is not None:
            return _Stop.INTERRUPTED
        reason = self._controls.stop_reason
        return _Stop.NONE if reason is None else _Stop.DONE if reason == REQUEST else _Stop.INTERRUPTED


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
