"""The work of each process in tests of routers, and what it is compared with: plain transformers and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import Engine, StepResult
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.testing.engine_cases import (
    gradient_of_step,
    make_batches,
    make_sequences,
    make_spec,
    plain_step_spec,
    policy_loss,
    train,
    truth,
    weights,
)
from rollmesh.testing.plain_routers import PlainRouters, with_experts
from rollmesh.testing.worlds import Harness

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def step(
    harness: Harness,
    model: Path,
    router: dict[str, Any],
    sequences: Sequence[TrainSequence],
    token_budget: int,
    changes: dict[str, Any],
) -> tuple[StepResult, dict[str, Tensor]]:
    """The result of a step, and the gradient that it has followed; collective."""
    engine = harness.make(plain_step_spec(model, router=RouterSection(**router), **changes))
    before = weights(engine)
    result = train(engine, sequences, token_budget=token_budget)
    return result, gradient_of_step(before, weights(engine))


def infer(
    harness: Harness, model: Path, router: dict[str, Any], sequences: Sequence[TrainSequence], rows: bool
) -> Tensor | None:
    """Log-probs of the trained tokens, where they arise; collective."""
    engine: Any = harness.make(make_spec(model, router=RouterSection(**router)))
    if rows:
        engine._runner.repack("of a test")
    outputs = engine.infer([pack(sequences)])
    return outputs[0].policy()[0] if outputs else None


def bias_after(harness: Harness, model: Path, rate: float | None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The biases of routers after a step, and its metrics; collective."""
    engine: Engine = harness.make(make_spec(model, router=RouterSection(bias_update_rate=rate)))
    result = train(engine, make_sequences(1))
    found = {name: tensor for name, tensor in weights(engine).items() if name.endswith("correction_bias")}
    return found, result.metrics


def continued(harness: Harness, model: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after a step of a run, and after the same step of one that continues from its checkpoint; collective."""
    found = []
    spec = make_spec(model, router=RouterSection(load_balance_coeff=0.5))
    first, second = harness.make(spec), harness.make(spec)
    train(first, make_sequences(1))
    first.begin_checkpoint(folder, {"of": "a test"}).result(60.0)
    assert second.load_checkpoint(folder) == {"of": "a test"}
    for engine in (first, second):
        train(engine, make_sequences(2))
        found.append(weights(engine))
    return found[0], found[1]


def in_parts(harness: Harness, model: Path) -> list[float]:
    """Norms of the gradient of a step in one call, and in two of half the micro-batches each; collective."""
    norms = []
    for parts in (1, 2):
        engine = harness.make(make_spec(model, router=RouterSection(z_loss_coeff=0.1)))
        batches = make_batches(engine, make_sequences(1), 24)
        counts = engine.global_counts(batches)
        for first in range(parts):
            engine.accumulate(batches[first::parts], policy_loss, counts)
        norms.append(engine.apply().metrics["grad_norm"])
    return norms


def losses(model: Path, sequences: Sequence[TrainSequence], z_loss_coeff: float) -> tuple[float, float, Any]:
    """Losses of balance and of logits, means over layers and all computed tokens; the gradient of all but the balance.

    The first step has no loads that a loss of balance could follow.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    logits = router_logits(network, sequences)
    balance = sum(_balance(each) for each in logits)
    large = torch.stack([each.logsumexp(-1).square().mean() for each in logits]).sum()
    (z_loss_coeff * large).backward()
    plain = truth(model, sequences).gradient
    gradient = {
        name: plain[name] + (0.0 if parameter.grad is None else parameter.grad)
        for name, parameter in network.named_parameters()
    }
    return balance / LAYERS, large.item() / LAYERS, gradient


@torch.no_grad()
def _balance(logits: Tensor) -> float:
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN).indices, 1.0 / CHOSEN)
    return EXPERTS * float((chosen.mean(0) * logits.softmax(-1).mean(0)).sum())


def router_logits(network: Any, sequences: Sequence[TrainSequence]) -> list[Tensor]:
    """Logits by layer of the tokens that predict, of each sequence with its own prompt."""
    by_layer: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for sequence in sequences:
        before = int(np.flatnonzero(sequence.response_mask).max())
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids[:before]])
        found = network(torch.from_numpy(ids).long()[None], output_router_logits=True, use_cache=False).router_logits
        for layer, logits in zip(by_layer, found, strict=True):
            layer.append(logits)
    return [torch.cat(layer) for layer in by_layer]


def routed(sequences: Sequence[TrainSequence], seed: int) -> list[TrainSequence]:
    """The same with random experts, see `with_experts`."""
    return with_experts(sequences, LAYERS, EXPERTS, CHOSEN, seed)


def forced_log_probs(model: Path, sequences: Sequence[TrainSequence]) -> Tensor:
    """Log-probs of trained tokens with the experts that sequences bring, one sequence at a time."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    routers, found = PlainRouters(network), []
    for s in sequences:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
        routers.prepare(s)
        logits = network(ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / s.temperature
        own = logits.log_softmax(-1).gather(1, ids[len(s.prompt_ids) :, None])[:, 0]
        found.append(own[torch.from_numpy(s.response_mask == 1)])
    return torch.cat(found).detach()
