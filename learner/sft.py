"""Supervised training on prompt-response pairs, on the learner's engine: a warm start for reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.runtime.devices import choose_device

Pair = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[int]] | TrainSequence
"""Token ids of a prompt and of its response (end token included). Where not all of the response is the model's own
(results of tools), a mask is the third: 1 is trained. Or both as a sequence, which may have images."""


def cross_entropy(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Mean negative log-likelihood of the response tokens: sum_t -log pi(y_t) / N.

    Args:
        output: of the language model, with gradient.
        tokens: not used: every trained token counts the same.
        counts: sizes of the whole batch.
    """
    del tokens
    log_probs, entropy = output.policy()
    metrics = Metrics(sums={"actor/entropy": entropy.detach().sum()})
    return LossOutput(-log_probs.sum() / max(counts.tokens, 1), metrics)


def warm_start(
    model_folder: Path | str,
    pairs: Sequence[Pair],
    *,
    steps: int,
    lr: float,
    batch: int,
    out_folder: Path,
    seed: int = 0,
    token_budget: int = 16384,
) -> list[float]:
    """Trains a model on pairs drawn without replacement per epoch, and writes it as a Hugging Face folder.

    Args:
        model_folder: folder or hub id to start from.
        pairs: the data.
        steps: optimizer steps.
        lr: peak learning rate (AdamW, linear warm-up over a tenth of the steps, then linear decay to a tenth).
        batch: pairs per step.
        out_folder: where the result goes.
        seed: of the order.
        token_budget: tokens per micro-batch.

    Returns:
        Loss of every step, in nats per token.

    Raises:
        DataError: no pairs, an empty prompt or response, or a model that cannot be loaded.
    """
    sequences = [_sequence(index, pair) for index, pair in enumerate(pairs)]
    if not sequences:
        raise DataError("no pairs to train on")
    optimizer = OptimizerSection(lr=lr, schedule="linear", warmup_steps=steps // 10, min_lr_ratio=0.1)
    device = choose_device("auto", "device")
    spec = EngineSpec(ModelSection(path=str(model_folder)), optimizer, total_steps=steps, device=device, seed=seed)
    engine = create_engine(spec)
    try:
        engine.probe()
        order = _ShuffledIndices(len(sequences), seed)
        losses = []
        for _ in range(steps):
            chosen = [sequences[index] for index in order.next(min(batch, len(sequences)))]
            items = [PlanItem(i, len(s.prompt_ids), len(s.response_ids)) for i, s in enumerate(chosen)]
            plan = plan_batch(items, token_budget=token_budget, packing=engine.packing)
            packed = [pack(chosen, indices, engine.device) for indices in plan.minibatches[0][0]]
            engine.accumulate(packed, cross_entropy, engine.global_counts(packed))
            losses.append(engine.apply().metrics["loss"])
        engine.export_hf(out_folder)
    finally:
        engine.close()
    return losses


class _ShuffledIndices:
    """Indices in a shuffled order, reshuffled for every pass."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._count = count
        self._remaining: list[int] = []

    def next(self, number: int) -> list[int]:
        while len(self._remaining) < number:
            self._remaining.extend(self._rng.permutation(self._count).tolist())
        taken, self._remaining = self._remaining[:number], self._remaining[number:]
        return taken


def _sequence(index: int, pair: Pair) -> TrainSequence:
    if isinstance(pair, TrainSequence):
        return pair
    prompt, response = (np.asarray(ids, dtype=np.int32) for ids in pair[:2])
    if not len(prompt) or not len(response):
        raise DataError(f"pair {index} has an empty {'response' if len(prompt) else 'prompt'}")
    count = len(response)
    mask = np.asarray(pair[2], dtype=np.uint8) if len(pair) == 3 else np.ones(count, dtype=np.uint8)
    if len(mask) != count:
        raise DataError(f"pair {index} has a mask of {len(mask)} for {count} tokens")
    return TrainSequence(prompt, response, mask, np.zeros(count, dtype=np.float32))
