"""The optimizer's step: gradients that add up over micro-batches, and then change the model or are given up.

Invariants: gradients are sums of the micro-batches' shares over all data-parallel ranks (FSDP averages over processes,
so shares are multiplied by their number). All ranks run the same number of micro-batches, short ones fill up with a
share of zero. A step without a finite gradient changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.experts.layer_router import token_weight
from rollmesh.learner.engines.fsdp2.optimizers.clipping import clip_gradients
from rollmesh.learner.engines.fsdp2.preparation.fsdp import recover
from rollmesh.learner.engines.fsdp2.preparation.gradient_sync import drop_whole_gradients, synchronize_gradients
from rollmesh.learner.engines.fsdp2.runner import ModelRunner
from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.engines.schedule import RunStep, learning_rate
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import ConfigError


class TrainingStep:
    """The steps of one model, one at a time.

    Args:
        runner: the model.
        optimizer: of its parameters.
        update: takes the optimizer's step.
        section: schedule and clipping.
        total_steps: see `EngineSpec`.
        sync_once: see `EngineSpec`.

    Attributes:
        steps: done so far.
        pending: the present one; None: no gradient is accumulated.
    """

    def __init__(
        self,
        runner: ModelRunner,
        optimizer: Optimizer,
        update: Callable[[], None],
        section: OptimizerSection,
        total_steps: int,
        *,
        sync_once: bool,
    ) -> None:
        self._runner = runner
        self._optimizer = optimizer
        self._update = update
        self._section = section
        self._total_steps = total_steps
        self._sync_once = sync_once
        self._stuck = False
        self.steps = 0
        self.pending: PendingStep | None = None

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        """See `Engine`."""
        if self._stuck:
            raise ConfigError(
                "a pass of the sharded model has broken off, and torch before 2.13 cannot make another one",
                hint="install torch 2.13 or later; a learner that is started again continues from its last checkpoint",
            )
        runner = self._runner
        pending = self.pending = self.pending or PendingStep(torch.zeros((), device=runner.device))
        real, filling = runner.fill_up(batches)
        pending.counted |= counts.tokens > 0
        pending.computed |= bool(real or filling)
        weight = self._router_weight(real, counts)
        batches = [*real, *filling]
        pending.passing = True
        for number, batch in enumerate(batches, 1):
            synchronize_gradients(runner.module, last=number == len(batches), once=self._sync_once)
            with runner.routers.trained(weight) if number <= len(real) else nullcontext():
                output, differentiable = runner.forward(batch)
            share = _zero(differentiable)
            if number <= len(real) and runner.layout.has_results:
                result = loss(output, batch.tokens, counts)
                pending.add(result.loss, result.metrics, batch.tokens.num_tokens)
                # A loss of which nothing depends on the model has a gradient all the same: zero.
                share = result.loss if result.loss.requires_grad else share
            (share * runner.layout.processes).backward()
        pending.passing = False

    def apply(self, at: RunStep | None) -> StepResult:
        """See `Engine`."""
        if (pending := self.pending) is None:
            raise RuntimeError("no gradient was accumulated")
        try:
            if not pending.counted:
                return StepResult({}, skipped=False)
            if not pending.computed:
                # Nothing had an advantage on any rank: a gradient of zero, which the optimizer's moments still follow.
                for parameter in self._runner.parameters:
                    parameter.grad = torch.zeros_like(parameter)
            norm = clip_gradients(self._runner.parameters, self._section.max_grad_norm)
            rate = learning_rate(self._section, at or RunStep(self.steps, self._total_steps))
            # Before the weights change: they may be refused.
            metrics = pending.metrics(self._runner.world)
            skipped = not np.isfinite(norm)
            metrics |= self._runner.routers.finish_step(skipped=skipped)
            if not skipped:
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                self._update()
                self.steps += 1
            return StepResult(metrics | {"grad_norm": norm, "lr": rate}, skipped)
        finally:
            self.pending = None
            self._optimizer.zero_grad()

    def discard(self) -> None:
        """See `Engine`."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if pending.computed:
            # FSDP keeps a part of what a pass that broke off has computed.
            self._stuck = not recover(self._runner.module) and pending.passing
            drop_whole_gradients(self._runner.module)
            self._runner.routers.forget()
        self._optimizer.zero_grad()

    def _router_weight(self, batches: Sequence[PackedBatch], counts: GlobalCounts) -> float:
        """Weight of each token in the losses of routers; collective. Gradients are averaged over processes."""
        runner = self._runner
        if not runner.routers.have_losses:
            return 0.0
        return runner.layout.processes * token_weight(batches, counts, runner.layout, runner.world)


def _zero(output: Tensor) -> Tensor:
    """0 with a gradient of zeros, whatever the values are."""
    return output.nan_to_num(neginf=0.0).sum() * 0.0
