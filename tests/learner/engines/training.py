"""A training step as the learner does it: plan, pack, count, update."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from rollmesh.learner.algorithms.aggregation import Aggregation, aggregate
from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.losses.ppo import ppo
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.interface import Engine, StepResult
from rollmesh.testing.engine_cases import critic_loss as critic_loss
from rollmesh.testing.engine_cases import metrics_of_every_kind, with_returns
from tests.learner.engines.models import make_sequences

# By engine, the gradients of its last step.
_followed: WeakKeyDictionary[Engine, dict[str, torch.Tensor]] = WeakKeyDictionary()
GROUPS = 6
MEMBERS = 3


def policy_loss(mode: Aggregation = "token_mean", entropy_bonus: float = 0.0) -> Loss:
    """The clipped surrogate against the behaviour policy, with metrics of every kind."""

    def loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, entropy = output.policy()
        per_token, metrics = ppo(log_probs, tokens.behaviour_log_probs, tokens)
        if entropy_bonus:
            per_token = per_token - entropy_bonus * entropy
        own = metrics_of_every_kind(log_probs, entropy, tokens)
        return LossOutput(aggregate(per_token, tokens, counts, mode, 12.0), metrics | own)

    return loss


def make_batches(
    engine: Engine, seed: int, groups: int = GROUPS, token_budget: int = 48, sequences=None
) -> list[PackedBatch]:
    """The micro-batches of the engine's rank."""
    if sequences is None:
        sequences = make_sequences(seed, groups=groups, members=MEMBERS)
    items = [PlanItem(i // MEMBERS, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
    plan = plan_batch(items, token_budget=token_budget, ranks=engine.layout.dp_size)
    share = plan.minibatches[0][engine.layout.dp_rank]
    return [with_returns(pack(sequences, indices, engine.device)) for indices in share]


def train_step(engine: Engine, seed: int, loss: Loss | None = None, **how) -> StepResult:
    """One optimizer step on random groups, planned for the engine's ranks; `how`: see `make_batches`."""
    batches = make_batches(engine, seed, **how)
    return take_step(engine, batches, loss or policy_loss())


def take_step(engine: Engine, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
    """One optimizer step on micro-batches; `gradients` gives what it followed."""
    engine.accumulate(batches, loss, engine.global_counts(batches))
    _followed[engine] = {
        name: _full(p.grad).clone() for name, p in engine._runner.module.named_parameters() if p.grad is not None
    }
    return engine.apply()


def log_probs(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    """Log-probs of one micro-batch."""
    (output,) = engine.infer([batch])
    return output.policy()[0]


def values(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    """Values of one micro-batch."""
    (output,) = engine.infer([batch])
    assert output.values is not None
    return output.values


def gradients(engine) -> dict[str, torch.Tensor]:
    """Full gradients of the last step by parameter name."""
    return _followed[engine]


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Full weights by name; collective."""
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
