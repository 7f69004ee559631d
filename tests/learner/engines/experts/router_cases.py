"""The work of each process in tests of routers, and what it is compared with: plain transformers and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.experts.balance import balance_loss, z_loss
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


def losses(model: Path, sequences: Sequence[TrainSequence], router: RouterSection) -> tuple[float, float, Any]:
    """Losses of balance and of logits, means over layers, over all tokens that are computed; the whole gradient."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    logits = router_logits(network, sequences)
    balance = torch.stack([balance_loss(each, each.topk(CHOSEN).indices) for each in logits]).sum()
    large = torch.stack([z_loss(each) for each in logits]).sum()
    ((router.load_balance_coeff or 0.0) * balance + (router.z_loss_coeff or 0.0) * large).backward()
    plain = truth(model, sequences).gradient
    gradient = {
        name: plain[name] + (0.0 if parameter.grad is None else parameter.grad)
        for name, parameter in network.named_parameters()
    }
    return balance.item() / LAYERS, large.item() / LAYERS, gradient


def router_logits(network: Any, sequences: Sequence[TrainSequence]) -> list[Tensor]:
    """Logits of the tokens that are computed, layer by layer: a prompt once, and of responses all that predict."""
    by_layer: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    seen: set[int] = set()
    for sequence in sequences:
        before, prompt = int(np.flatnonzero(sequence.response_mask).max()), len(sequence.prompt_ids)
        ids = np.concatenate([sequence.prompt_ids, sequence.response_ids[:before]])
        found = network(torch.from_numpy(ids).long()[None], output_router_logits=True, use_cache=False).router_logits
        for layer, logits in zip(by_layer, found, strict=True):
            layer.append(logits[prompt:] if id(sequence.prompt_ids) in seen else logits)
        seen.add(id(sequence.prompt_ids))
    return [torch.cat(layer) for layer in by_layer]


def routed(sequences: Sequence[TrainSequence], seed: int) -> list[TrainSequence]:
    """The same with random experts: of all tokens but one of a prompt, and those of the last response."""
    rng = np.random.default_rng(seed)

    def experts(tokens: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        scores = rng.random((tokens, LAYERS, EXPERTS))
        return scores.argsort(-1)[..., :CHOSEN].astype(np.int16)

    prompts = {id(s.prompt_ids): experts(len(s.prompt_ids)) for s in sequences}
    next(iter(prompts.values()))[0] = -1
    given = [
        replace(s, prompt_experts=prompts[id(s.prompt_ids)], response_experts=experts(len(s.response_ids) - 1))
        for s in sequences
    ]
    return [*given[:-1], replace(given[-1], response_experts=None)]


class Forced:
    """Plain transformers with given experts: the router of each layer is asked for its logits alone.

    Args:
        network: a Qwen3 with experts.
    """

    def __init__(self, network: Any) -> None:
        self.given: Tensor | None = None
        for number, layer in enumerate(network.model.layers):
            self._force(layer.mlp.gate, number)

    def _force(self, gate: Any, number: int) -> None:
        original = gate.forward

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = original(hidden)
            assert self.given is not None
            given = self.given[:, number]
            chosen = torch.where(given < 0, own, given)
            values = logits.softmax(-1).gather(-1, chosen)
            return logits, values / values.sum(-1, keepdim=True) if gate.norm_topk_prob else values, chosen

        gate.forward = forward


def forced_log_probs(model: Path, sequences: Sequence[TrainSequence]) -> Tensor:
    """Log-probs of trained tokens with the experts that sequences bring, one sequence at a time."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    forced, found = Forced(network), []
    for s in sequences:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
        given = np.full((len(ids), LAYERS, CHOSEN), -1, dtype=np.int64)
        for first, experts in ((0, s.prompt_experts), (len(s.prompt_ids), s.response_experts)):
            if experts is not None:
                given[first : first + len(experts)] = experts
        forced.given = torch.from_numpy(given)
        logits = network(ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / s.temperature
        own = logits.log_softmax(-1).gather(1, ids[len(s.prompt_ids) :, None])[:, 0]
        found.append(own[torch.from_numpy(s.response_mask == 1)])
    return torch.cat(found).detach()
