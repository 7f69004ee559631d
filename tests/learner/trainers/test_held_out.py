"""Means over held-out rows: each term counts the same, in whichever batch it comes."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollmesh.learner.algorithms.losses.supervised import cross_entropy
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.ragged import segment_mean
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.engines.world import World
from rollmesh.learner.trainers.held_out import evaluate
from rollmesh.learner.trainers.step_batch import StepBatch
from rollmesh.learner.trainers.step_loss import StepLoss
from tests.learner.algorithms.samples import sample

# Lengths of sequences by micro-batch, batch and source. Tokens of a sequence of n have log-prob -n and entropy 2 n.
SOURCES = {"short": [[[1, 1], [2]], [[3]], []], "long": [[[5], [7]]]}


class Engine:
    """Looks its outputs up."""

    world = World("cpu", need_group=False)
    device = torch.device("cpu")

    def infer(self, micro_batches: list[Any]) -> list[ModelOutput]:
        """See `engines.interface.Engine`."""
        lengths = [micro.tokens.sequence_lengths[micro.tokens.sequence_ids].float() for micro in micro_batches]
        return [ModelOutput(log_probs=-of_tokens, entropy=2 * of_tokens) for of_tokens in lengths]


class Rows:
    """The batches of a source."""

    def __init__(self, batches: list[list[list[int]]]) -> None:
        self._batches = batches

    def steps(self, _rows: int) -> int:
        """See `OrderedRows`."""
        return len(self._batches)

    def batch(self, step: int) -> StepBatch:
        parts: Any = [SimpleNamespace(tokens=sample(lengths).tokens) for lengths in self._batches[step]]
        lengths = list(chain.from_iterable(self._batches[step]))
        return StepBatch(parts, [], GlobalCounts(sum(lengths), len(lengths)), sum(lengths), len(lengths), 0)


def by_sequence(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    means = segment_mean(-output.policy()[0], tokens.sequence_ids, tokens.num_sequences)
    return LossOutput(means.sum() / max(counts.sequences, 1), Metrics())


def measured(loss: StepLoss, *labels: str) -> dict[str, float]:
    engine, batch_of = Engine(), Rows.batch
    sources = {label: Rows(SOURCES[label]) for label in labels}
    return evaluate(engine, loss, sources, 2, batch_of)  # type: ignore[arg-type]  # the parts that it uses


def test_a_mean_over_tokens_is_one_over_the_tokens_of_all_batches() -> None:
    loss = StepLoss(cross_entropy)
    assert measured(loss, "short") == pytest.approx({"eval/loss": 15 / 7, "eval/entropy": 30 / 7})
    assert measured(loss, "short", "long") == pytest.approx(
        {"eval/loss": 89 / 19, "eval/loss/short": 15 / 7, "eval/loss/long": 74 / 12}
        | {"eval/entropy": 178 / 19, "eval/entropy/short": 30 / 7, "eval/entropy/long": 148 / 12}
    )
    assert measured(loss) == {}


def test_a_mean_over_sequences_is_one_over_the_sequences_of_all_batches() -> None:
    loss = StepLoss(by_sequence, per_sequence=0.5)
    assert measured(loss, "short", "long") == pytest.approx(
        {"eval/loss": 19 / 6, "eval/loss/short": 7 / 4, "eval/loss/long": 12 / 2}
    )
