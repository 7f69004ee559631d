"""The optimizer's step under Megatron: gradients that add up, and then change the model or are given up.

Invariants: gradients are sums of the micro-batches' shares over all data-parallel ranks. A step without a finite
gradient changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.engines.megatron.computing.runner import MegatronRunner
from rollmesh.learner.engines.megatron.groups import MegatronGroups
from rollmesh.learner.engines.megatron.training.gradients import Gradients
from rollmesh.learner.engines.megatron.training.optimizer import MegatronOptimizer
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.engines.schedule import RunStep, learning_rate
from rollmesh.mesh.config.learner import OptimizerSection


class MegatronStep:
    """The steps of one model, one at a time.

    Args:
        runner: the model.
        optimizer: of its parameters.
        gradients: of its parameters.
        section: schedule and clipping.
        total_steps: see `EngineSpec`.
        groups: of its layout.

    Attributes:
        steps: done so far.
        pending: the present one; None: no gradient is accumulated.
    """

    def __init__(
        self,
        runner: MegatronRunner,
        optimizer: MegatronOptimizer,
        gradients: Gradients,
        section: OptimizerSection,
        total_steps: int,
        groups: MegatronGroups,
    ) -> None:
        self._runner, self._optimizer, self._gradients = runner, optimizer, gradients
        self._section, self._total_steps, self._groups = section, total_steps, groups
        self.steps = 0
        self.pending: PendingStep | None = None

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        """See `Engine`."""
        runner = self._runner
        pending = self.pending = self.pending or PendingStep(torch.zeros((), device=runner.device))
        pending.counted |= counts.tokens > 0
        real, filling = runner.fill_up(batches)
        if not real and not filling:
            return
        pending.computed = True
        self._gradients.prepare()
        with runner.routers.trained(batches, counts):
            self._run(pending, real, filling, loss, counts)
        self._gradients.mark_reduced()

    def _run(
        self,
        pending: PendingStep,
        real: Sequence[PackedBatch],
        filling: Sequence[PackedBatch],
        loss: Loss,
        counts: GlobalCounts,
    ) -> None:
        """Runs the passes of a call."""
        runner = self._runner

        def consume(number: int, output: ModelOutput) -> Tensor:
            differentiable = output.values if output.values is not None else output.policy()[0]
            share = _zero(differentiable)
            if number < len(real) and runner.layout.has_results:
                result = loss(output, real[number].tokens, counts)
                pending.add(result.loss, result.metrics, real[number].tokens.num_tokens)
                # A loss of which nothing depends on the model has a gradient all the same: zero.
                share = result.loss if result.loss.requires_grad else share
            return share

        pending.passing = True
        with runner.finalizing(_finalize):
            runner.passes.run([*real, *filling], consume, backward=True)
        pending.passing = False

    def apply(self, at: RunStep | None) -> StepResult:
        """See `Engine`."""
        if (pending := self.pending) is None:
            raise RuntimeError("no gradient was accumulated")
        try:
            if not pending.counted:
                return StepResult({}, skipped=False)
            with self._groups.active():
                self._gradients.finish()
            with self._groups.active(optimizer=True):
                norm = self._optimizer.gradient_norm()
            rate = learning_rate(self._section, at or RunStep(self.steps, self._total_steps))
            # Before the weights change: they may be refused.
            metrics = pending.metrics(self._runner.world)
            skipped = not np.isfinite(norm)
            metrics |= self._runner.routers.finish_step(skipped=skipped)
            if not skipped:
                with self._groups.active(optimizer=True):
                    self._optimizer.step(rate, norm)
                self.steps += 1
            return StepResult(metrics | {"grad_norm": norm, "lr": rate}, skipped)
        finally:
            self._give_up()

    def discard(self) -> None:
        """See `Engine`."""
        if self.pending is not None:
            self._give_up()

    def _give_up(self) -> None:
        broken = self.pending is not None and self.pending.passing
        self.pending = None
        self._runner.routers.forget()
        with self._groups.active():
            self._optimizer.release_gradients()
            self._gradients.free(broken=broken)


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sums gradients over ranks at the end of a schedule; the loss is normalized already."""
    del num_tokens
    finalize_model_grads(model, None, **groups)


def _zero(output: Tensor) -> Tensor:
    """0 with a gradient of zeros, whatever the values are."""
    return output.nan_to_num(neginf=0.0).sum() * 0.0
