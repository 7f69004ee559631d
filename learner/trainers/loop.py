"""The training loop: one batch of rows after another, with evaluations and checkpoints between them.

Invariants: the rows of a step depend on the data, the seed and the step's number alone. So a run that continues trains
what it would have trained. Every process runs the loop, and rank 0 alone decides when a checkpoint is due and
whether the run ends early. A checkpoint names the step that it contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.learner.distributed.step_meter import StepMeter
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.example_loader import ExampleLoader, Examples
from rollmesh.learner.trainers.rows import Rows
from rollmesh.learner.trainers.step_batch import StepBatch, build_batch
from rollmesh.learner.trainers.step_loss import StepLoss

Report = Callable[[int, Mapping[str, Any]], object]


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
        held_out: rows to evaluate on; None: there are none.
        checkpoints: None: none are written.
        stop_asked: rank 0 is asked to end early.
    """

    def __init__(
        self,
        engine: Engine,
        loss: StepLoss,
        loader: ExampleLoader,
        train: Rows,
        rules: LoopRules,
        report: Report,
        *,
        held_out: Rows | None = None,
        checkpoints: Checkpoints | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._loss, self._loader = engine, loss, loader
        self._train, self._held_out, self._rules = train, held_out, rules
        self._report, self._checkpoints, self._stop_asked = report, checkpoints, stop_asked
        self._limit = SkipLimit(rules.max_skipped)

    def run(self, start: int = 0) -> bool:
        """Trains from a step on, which counts from 0; False: asked to end before the last one."""
        rules, ahead = self._rules, self._load(start)
        for step in range(start, rules.steps):
            began, examples = time.perf_counter(), self._loader.take(ahead)
            if step + 1 < rules.steps:
                ahead = self._load(step + 1)
            record = self._step(step, examples, began)
            done = step + 1
            if self._held_out is not None and (done == rules.steps or _divides(rules.eval_every, done)):
                record |= self._evaluate(self._held_out)
            if self._engine.layout.leads:
                self._report(done, record)
            if self._ends_after(done) and done < rules.steps:
                return False
        return True

    def _load(self, step: int) -> Future[Examples]:
        return self._loader.begin(self._train.source, self._train.of_step(step, self._rules.rows))

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
            result = engine.apply()
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

    @torch.no_grad()
    def _evaluate(self, rows: Rows) -> dict[str, float]:
        """Loss and metrics on held-out rows, the same in every process; collective."""
        engine, pending, weight = self._engine, None, 0.0
        for step in range(-(-rows.order.rows // self._rules.rows)):
            chosen = rows.of_step(step, self._rules.rows)
            batch = self._batch(self._loader.take(self._loader.begin(rows.source, chosen)))
            terms = self._loss.terms(batch.counts)
            weight += terms
            pending = pending or PendingStep(torch.zeros((), device=engine.device))
            outputs = engine.infer(batch.micro_batches)
            # Where results arise there is one for each micro-batch, elsewhere none.
            for output, micro in zip(outputs, batch.micro_batches, strict=False):
                result = self._loss(output, micro.tokens, batch.counts)
                pending.add(result.loss * terms, result.metrics, micro.tokens.num_tokens)
        if pending is None or not weight:
            return {}
        found = pending.metrics(engine.world)
        found["loss"] /= weight
        return {f"eval/{name.removeprefix(f'{ACTOR}/')}": value for name, value in found.items()}

    def _ends_after(self, step: int) -> bool:
        """Writes a checkpoint where one is due, and at the end; says whether the run ends. Collective."""
        asked = self._stop_asked()
        due = self._checkpoints is not None and self._checkpoints.due(step)
        stop, save = self._engine.world.max_ints([int(asked), int(due)] if self._engine.layout.leads else [0, 0])
        last = bool(stop) or step == self._rules.steps
        if self._checkpoints is not None and (save or last):
            self._checkpoints.begin(self._engine, step)
            if last:
                self._checkpoints.wait()
        return last


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
