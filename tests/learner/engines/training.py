"""A training step as the learner does it: plan, pack, count, update."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from learner.algorithms.load import load_algorithm
from learner.algorithms.types import UpdatePlan
from learner.batching.pack import pack
from learner.batching.plan import Item, plan_batch
from learner.engines.base import Engine, StepResult
from tests.learner.engines.models import make_sequences

GROUPS = 6
MEMBERS = 3


def train_step(
    engine: Engine,
    seed: int,
    groups: int = GROUPS,
    token_budget: int = 48,
    params: dict[str, object] | None = None,
    sequences=None,
) -> StepResult:
    """One optimizer step on random groups, planned for the engine's ranks."""
    if sequences is None:
        sequences = make_sequences(seed, groups=groups, members=MEMBERS)
    items = [Item(i // MEMBERS, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
    plan = plan_batch(items, token_budget=token_budget, ranks=engine.world_size)
    batches = [pack(sequences, indices, device=engine.device) for indices in plan.minibatches[0][engine.rank]]
    algorithm = load_algorithm("grpo", params or {}, UpdatePlan(max_staleness=4, max_response_tokens=12))
    return engine.train_batch(batches, algorithm.loss, engine.global_counts(batches))


def gradients(engine) -> dict[str, torch.Tensor]:
    """Full gradients of the last step by parameter name; collective."""
    return {name: _full(p.grad).clone() for name, p in engine._model.named_parameters()}


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Full weights by name; collective."""
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
