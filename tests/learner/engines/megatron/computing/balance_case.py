"""A step with losses of routers, for the processes of a world, and the same by transformers and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import StepResult
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.testing.engine_cases import (
    critic_loss,
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
from rollmesh.testing.worlds import Harness

BALANCE, LOGITS = 0.5, 0.1
_ONE_MICRO_BATCH = 1 << 20


def step(harness: Harness, model: Path) -> tuple[StepResult, dict[str, Tensor]]:
    """The result of a step of one micro-batch, and the gradient that it has followed; collective."""
    section = RouterSection(load_balance_coeff=BALANCE, z_loss_coeff=LOGITS)
    engine = harness.make(plain_step_spec(model, router=section))
    before = weights(engine)
    result = train(engine, make_sequences(1), token_budget=_ONE_MICRO_BATCH)
    return result, gradient_of_step(before, weights(engine))


def beside_another(harness: Harness, model: Path) -> list[float]:
    """The losses of balance of a model alone, and of it and a critic whose micro-batches come between; collective."""
    section = RouterSection(load_balance_coeff=BALANCE)
    alone, first = (harness.make(make_spec(model, router=section)) for _ in range(2))
    second = harness.make(make_spec(model, router=section), "value_model")
    results = [train(alone, make_sequences(1))]
    for engine, loss in ((first, policy_loss), (second, critic_loss)):
        batches = make_batches(engine, make_sequences(1))
        engine.accumulate(batches, loss, engine.global_counts(batches))
    results += [first.apply(), second.apply()]
    return [result.metrics["load_balance_loss"] for result in results]


def in_parts(harness: Harness, model: Path) -> list[float]:
    """Norms of the gradient of a step in one call, and in two of half the micro-batches each; collective."""
    norms = []
    for parts in (1, 2):
        engine = harness.make(make_spec(model, router=RouterSection(z_loss_coeff=LOGITS)))
        batches = make_batches(engine, make_sequences(1))
        counts = engine.global_counts(batches)
        for first in range(parts):
            engine.accumulate(batches[first::parts], policy_loss, counts)
        norms.append(engine.apply().metrics["grad_norm"])
    return norms


def probe(harness: Harness, model: Path) -> float | None:
    """The probe's difference of gradients where routers have losses; collective."""
    section = RouterSection(load_balance_coeff=BALANCE, z_loss_coeff=LOGITS)
    return harness.make(make_spec(model, router=section)).probe().truth.gradient


def expected(model: Path) -> tuple[float, float, dict[str, Tensor]]:
    """Both losses without their weights, as means over layers, and the gradient of everything."""
    sequences = make_sequences(1)
    plain = truth(model, sequences)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    computed = _computed(sequences)
    outputs = [network(each[None], output_router_logits=True, use_cache=False).router_logits for each in computed]
    balance, logits = torch.zeros(()), torch.zeros(())
    layers = len(outputs[0])
    for layer in range(layers):
        scores = torch.cat([each[layer] for each in outputs]).float()
        probabilities = scores.softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
        balance = balance + 4 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
        logits = logits + scores.logsumexp(-1).square().mean()
    (BALANCE * balance + LOGITS * logits).backward()
    gradient = {
        name: plain.gradient[name] + (0.0 if parameter.grad is None else parameter.grad)
        for name, parameter in network.named_parameters()
    }
    return float(balance) / layers, float(logits) / layers, gradient


def _computed(sequences: Sequence[TrainSequence]) -> list[Tensor]:
    """Tokens that are computed: of each response those before the last trained one, after its prompt.

    A response of which no token is computed adds nothing where others continue its prompt.
    """
    found: dict[int, list[Tensor]] = {}
    for sequence in sequences:
        before = int(np.flatnonzero(sequence.response_mask).max())
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids[:before]])
        group = found.setdefault(id(sequence.prompt_ids), [torch.from_numpy(sequence.prompt_ids).long()])
        if before:
            group.append(torch.from_numpy(ids).long())
    return [ids for prompt, *whole in found.values() for ids in (whole or [prompt])]
