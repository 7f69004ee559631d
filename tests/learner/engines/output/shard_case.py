"""Log-probs and gradients in one process of those that divide a vocabulary; tests run this in several."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.engines.output import layer
from rollmesh.learner.engines.output.layer import LogitMemory, VocabularyShard, shard_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.output.softmax_pieces import Targets

WIDTH, REAL = 8, 83
ALL, NOTHING = 1 << 40, 0


@dataclass(frozen=True)
class Case:
    """A micro-batch and the layer's settings."""

    form: LogitForm = field(default_factory=LogitForm)
    kept: int = NOTHING
    bias: bool = True
    dtype: torch.dtype = torch.float32
    rounded: bool = False
    tokens: int = 37
    entropy_gradient: bool = True


@dataclass(frozen=True)
class Found:
    """Results and gradients in one process; of the shard's rows those of weight and bias."""

    values: tuple[Tensor, ...]
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def compute(case: Case, rows: int, process: int, group: dist.ProcessGroup | None) -> Found:
    """The process's part of what the case asks for, with tiles of which nothing is a multiple."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(case.tokens, WIDTH, generator=random).to(case.dtype).requires_grad_()
    weight, bias = torch.randn(REAL, WIDTH, generator=random) / 3, torch.randn(REAL, generator=random) / 3
    # Padding that would win everywhere.
    weight, bias = (
        torch.cat([real, torch.full((3 * rows, *real.shape[1:]), 9.0)]).to(case.dtype).requires_grad_()
        for real in (weight, bias)
    )
    labels = torch.randint(0, case.form.columns or REAL, (case.tokens,), generator=random)
    temperatures = 0.5 + torch.rand(case.tokens, generator=random)
    targets = Targets(labels, temperatures, entropy_gradient=case.entropy_gradient, sum_pi_squared=True)
    pulls = torch.randn(2, case.tokens, generator=random)
    own = slice(process * rows, (process + 1) * rows)
    shard, memory = VocabularyShard(own.start, REAL, group), LogitMemory(case.kept, rounded=case.rounded)
    with patch.dict(layer.TILES, {"cpu": (16, 32)}):
        values = shard_log_probs(
            hidden, weight[own], bias[own] if case.bias else None, targets, shard, memory, case.form
        )
        pulled = (values[0] * pulls[0]).sum()
        (pulled + (values[1] * pulls[1]).sum() if case.entropy_gradient else pulled).backward()
    return Found(
        tuple(value.detach() for value in values),
        hidden.grad,
        weight.grad[own],
        bias.grad[own] if case.bias else None,
    )


def compute_shard(_harness, case: Case, rows: int) -> Found:
    return compute(case, rows, dist.get_rank(), dist.group.WORLD)


def compute_without_gradient(_harness, rows: int) -> Tensor:
    with torch.no_grad():
        hidden, weight = torch.ones(2, WIDTH), torch.zeros(rows, WIDTH)
        shard = VocabularyShard(dist.get_rank() * rows, REAL, dist.group.WORLD)
        targets = Targets(torch.tensor([0, REAL - 1]), sum_pi_squared=True)
        return torch.stack(shard_log_probs(hidden, weight, None, targets, shard, LogitMemory(ALL), LogitForm()))
