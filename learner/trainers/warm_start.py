"""Supervised training on tokens in memory, in this process: a warm start for reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.algorithms.losses.supervised import cross_entropy
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.examples import Example, sequence_from
from rollmesh.learner.data.records import Blocks
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.loop import LoopRules, TrainingLoop
from rollmesh.learner.trainers.rows import rows_of
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.runtime.devices import choose_device

Pair = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[int]] | TrainSequence
"""Token ids of a prompt and of its response (end token included). Where not all of the response is the model's own
(results of tools), a mask is the third: 1 is trained. Or both as a sequence, which may have images."""


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
    source = _Pairs(pairs)
    optimizer = OptimizerSection(lr=lr, schedule="linear", warmup_steps=steps // 10, min_lr_ratio=0.1)
    device = choose_device("auto", "device")
    spec = EngineSpec(ModelSection(path=str(model_folder)), optimizer, total_steps=steps, device=device, seed=seed)
    losses: list[float] = []

    def report(_step: int, record: Mapping[str, Any]) -> None:
        losses.append(record["actor/loss"])

    engine = create_engine(spec)
    try:
        engine.probe()
        loader = ExampleLoader(engine.world)
        rules = LoopRules(steps, min(batch, len(source)), token_budget)
        rows = rows_of(source, seed=seed, shuffle=True)
        try:
            TrainingLoop(engine, StepLoss(cross_entropy), loader, rows, rules, report).run()
        finally:
            loader.close()
        engine.export_hf(out_folder)
    finally:
        engine.close()
    return losses


class _Pairs:
    """Pairs as examples."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        if not pairs:
            raise DataError("no pairs to train on")
        self._examples = [_example(index, pair) for index, pair in enumerate(pairs)]

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def blocks(self) -> Blocks | None:
        return None

    def rows(self, indices: Sequence[int]) -> list[Example | None]:
        """See `RowSource`."""
        return [self._examples[row] for row in indices]


def _example(index: int, pair: Pair) -> Example:
    if isinstance(pair, TrainSequence):
        return Example((pair,))
    prompt, response = pair[:2]
    if not len(prompt) or not len(response):
        raise DataError(f"pair {index} has an empty {'response' if len(prompt) else 'prompt'}")
    mask = pair[2] if len(pair) == 3 else [1] * len(response)
    if len(mask) != len(response):
        raise DataError(f"pair {index} has a mask of {len(mask)} for {len(response)} tokens")
    return Example((sequence_from(prompt, response, mask),))
