"""Models, batches and losses for the tests of training engines, and what they are compared with.

The truth is transformers' own code: one eager forward pass per sequence, and autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.losses.ppo import ppo
from rollmesh.learner.algorithms.metrics import Metrics, log_ratio_histogram, weight_moments
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.algorithms.value import value_loss
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import PackedBatch, TrainSequence
from rollmesh.learner.engines.interface import Engine, EngineSpec, StepResult
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.testing.worlds import Harness

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of all models, as transformers names them."""
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"tie_word_embeddings": False}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {"tie_word_embeddings": False} | _EXPERTS),
}
"""Kinds of models: transformers' name, and settings."""

MEMBERS = 3
# With these an optimizer's first step shows the gradient, see `gradient_of_step`.
_PLAIN_STEP = OptimizerSection(lr=1.0, eps=1.0, max_grad_norm=1e9)


def make_model(folder: Path, architecture: str) -> Path:
    """Writes a random model of an architecture."""
    kind, settings = ARCHITECTURES[architecture]
    return save_random(AutoConfig.for_model(kind, **SMALL, **settings), folder)


def save_random(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Writes a model with random weights, large enough that attention matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def make_spec(folder: Path, **changes: Any) -> EngineSpec:
    """A float32 engine on the CPU with a large learning rate."""
    optimizer = OptimizerSection(lr=1e-2, eps=1e-2, max_grad_norm=1e9)
    return replace(EngineSpec(ModelSection(path=str(folder)), optimizer, total_steps=10), **changes)


def plain_step_spec(folder: Path, **changes: Any) -> EngineSpec:
    """An engine for `gradient_of_step`."""
    return make_spec(folder, optimizer=_PLAIN_STEP, **changes)


def make_sequences(seed: int, groups: int = 3, longest: int = 12) -> list[TrainSequence]:
    """Groups of random sequences that share their prompts; responses of 1 .. longest tokens, some masked in between."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)
        for _ in range(MEMBERS):
            count = int(rng.integers(1, longest + 1))
            mask = np.ones(count, dtype=np.uint8)
            if count > 3:
                mask[rng.integers(0, count, 2)] = 0
            ids = rng.integers(3, VOCABULARY, count).astype(np.int32)
            log_probs = rng.normal(-3.0, 0.5, count).astype(np.float32)
            temperature = float(rng.choice([0.7, 1.0, 1.3]))
            advantage, staleness = float(rng.normal()), int(rng.integers(0, 4))
            sequences.append(TrainSequence(prompt, ids, mask, log_probs, advantage, staleness, temperature))
    return sequences


def make_batches(engine: Engine, sequences: Sequence[TrainSequence], token_budget: int = 48) -> list[PackedBatch]:
    """The micro-batches of the engine's data-parallel rank."""
    share = divide(engine, sequences, token_budget)[engine.layout.dp_rank]
    return [with_returns(pack(sequences, indices, engine.device)) for indices in share]


def divide(engine: Engine, sequences: Sequence[TrainSequence], token_budget: int) -> Sequence[Sequence[Sequence[int]]]:
    """The micro-batches of each data-parallel rank, as indices of the sequences."""
    items = [PlanItem(i // MEMBERS, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(sequences)]
    plan = plan_batch(items, token_budget=token_budget, ranks=engine.layout.dp_size, packing=engine.packing)
    return plan.minibatches[0]


def with_returns(batch: PackedBatch) -> PackedBatch:
    """Fills in what a batch stage would: targets and old values that depend on the token alone."""
    tokens = batch.tokens
    tokens.returns = tokens.advantages + tokens.behaviour_log_probs.sin()
    tokens.old_values = 0.3 * tokens.advantages
    return batch


def policy_loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """The clipped surrogate against the behaviour policy, with metrics of every kind."""
    log_probs, entropy = output.policy()
    per_token, metrics = ppo(log_probs, tokens.behaviour_log_probs, tokens)
    own = metrics_of_every_kind(log_probs, entropy, tokens)
    return LossOutput(aggregate(per_token, tokens, counts, "seq_mean_token_mean"), metrics | own)


def metrics_of_every_kind(log_probs: Tensor, entropy: Tensor, tokens: TokenBatch) -> Metrics:
    """A sum, moments, a histogram and a maximum."""
    ratios = (log_probs - tokens.behaviour_log_probs).detach()
    return Metrics(
        sums={"entropy": entropy.detach().sum()},
        weights={"ratio": weight_moments(ratios.exp())},
        log_ratios={"drift": log_ratio_histogram(ratios)},
        maxima={"largest_ratio": ratios.max()},
    )


def entropy_loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """The surrogate with a bonus for entropy."""
    plain = policy_loss(output, tokens, counts)
    bonus = aggregate(output.policy()[1], tokens, counts, "token_mean")
    return LossOutput(plain.loss - 0.5 * bonus, plain.metrics)


def critic_loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Regression on the returns, see `with_returns`."""
    assert output.values is not None
    assert tokens.old_values is not None
    assert tokens.returns is not None
    per_token, metrics = value_loss(output.values, tokens.old_values, tokens.returns)
    return LossOutput(aggregate(per_token, tokens, counts, "token_mean"), metrics)


def infinite_loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """A loss with a gradient that no optimizer may follow."""
    return LossOutput(policy_loss(output, tokens, counts).loss * float("inf"), Metrics())


def train(
    engine: Engine, sequences: Sequence[TrainSequence], loss: Loss = policy_loss, token_budget: int = 48
) -> StepResult:
    """Takes one optimizer step."""
    batches = make_batches(engine, sequences, token_budget)
    engine.accumulate(batches, loss, engine.global_counts(batches))
    return engine.apply()


def export_critic(harness: Harness, model: Path, folder: Path) -> None:
    """Writes the folder of a value model after two steps; collective."""
    engine = harness.make(make_spec(model), "value_model")
    for seed in (8, 9):
        train(engine, make_sequences(seed), critic_loss)
    engine.export_hf(folder)


def weights(engine: Engine) -> dict[str, Tensor]:
    """Full float32 weights by name, in the leading process; collective."""
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}


def gradient_of_step(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient that a first step of AdamW has followed, of an engine of `plain_step_spec`.

    With a rate and an epsilon of 1 that step is g / (|g| + 1).
    """
    steps = {name: before[name] - after[name] for name in before}
    return {name: step / (1.0 - step.abs()) for name, step in steps.items()}


@dataclass(frozen=True, slots=True)
class Truth:
    """The results of transformers' own code.

    Attributes:
        outputs: for the trained tokens, sequence after sequence.
        loss: over all of them.
        gradient: by name.
    """

    outputs: ModelOutput
    loss: float
    gradient: dict[str, Tensor]

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradient."""
        return float(torch.stack([tensor.norm() for tensor in self.gradient.values()]).norm())


def truth(folder: Path, sequences: Sequence[TrainSequence], loss: Loss = policy_loss, *, values: bool = False) -> Truth:
    """The results of one eager forward pass per sequence, then autograd.

    Args:
        folder: of the model; one with a `value_head` for values.
        sequences: the batch.
        loss: of the whole batch.
        values: of a value model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    head = nn.Linear(model.config.hidden_size, 1)
    if values:
        saved = load_file(folder / "model.safetensors")
        head.load_state_dict({name: saved[f"value_head.{name}"] for name in ("weight", "bias")})
    outputs = [_plain_outputs(model, head if values else None, sequence) for sequence in sequences]
    joined = {
        name: torch.cat([getattr(output, name) for output in outputs])
        for name in (("values",) if values else ("log_probs", "entropy", "sum_pi_squared"))
    }
    batch = with_returns(pack(sequences))
    result = loss(ModelOutput(**joined), batch.tokens, batch.counts)
    result.loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if values:
        gradient |= {f"value_head.{name}": p.grad for name, p in head.named_parameters() if p.grad is not None}
    detached = ModelOutput(**{name: tensor.detach() for name, tensor in joined.items()})
    return Truth(detached, result.loss.item(), gradient)


def _plain_outputs(model: Any, head: nn.Module | None, sequence: TrainSequence) -> ModelOutput:
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()
    trained = torch.from_numpy(sequence.response_mask.astype(bool))
    prompt = len(sequence.prompt_ids)
    if head is not None:
        hidden = model.base_model(ids[None], use_cache=False).last_hidden_state[0]
        # The value before a token stands at the token before it.
        return ModelOutput(values=head(hidden)[prompt - 1 : -1, 0][trained])
    logits = model(ids[None], use_cache=False).logits[0, prompt - 1 : -1].float() / sequence.temperature
    every = torch.log_softmax(logits, -1)[trained]
    chosen = every.gather(1, ids[prompt:][trained][:, None])[:, 0]
    return ModelOutput(
        log_probs=chosen, entropy=-(every.exp() * every).sum(-1), sum_pi_squared=every.exp().square().sum(-1)
    )


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Tensors by name agree, to a part of the largest number among them."""
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        difference = float((found[name] - tensor).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference:.3g} apart, the largest number is {scale:.3g}"
