"""Aggregation of token losses: the five modes against plain loops, names, empty batches."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.algorithms.aggregation import AGGREGATIONS, aggregate, read_aggregation
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import GlobalCounts
from tests.learner.algorithms.samples import sample

LENGTHS = [3, 0, 1, 2]
ROWS = [[1.0, 2.0, 6.0], [], [5.0], [-1.0, 3.0]]
COUNTS = GlobalCounts(tokens=20, sequences=8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 16.0 / 20),
        ("seq_mean_token_mean", (3.0 + 5.0 + 1.0) / 8),
        ("seq_mean_token_sum", 16.0 / 8),
        ("seq_mean_token_sum_norm", 16.0 / (8 * 10)),
        ("token_sum", 16.0),
    ],
)
def test_divides_by_the_counts_of_the_whole_batch(mode, expected):
    loss = torch.tensor([value for row in ROWS for value in row], dtype=torch.float64)
    assert aggregate(loss, sample(LENGTHS).tokens, COUNTS, mode, horizon=10.0).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_micro_batch_without_tokens_adds_nothing(mode):
    empty = sample([0, 0])
    loss = empty.log_probs.requires_grad_()
    share = aggregate(loss, empty.tokens, GlobalCounts(0, 0), mode)
    share.backward()
    assert share.item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_verls_spelling_is_understood(mode):
    assert read_aggregation(mode) == read_aggregation(mode.replace("_", "-")) == mode


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("grpo", "seq_mean_token_mean"),
        ("bnpo", "token_mean"),
        ("dapo", "token_mean"),
        ("dr_grpo", "seq_mean_token_sum_norm"),
        ("luspo", "seq_mean_token_sum"),
    ],
)
def test_trls_loss_types_are_understood(name, mode):
    assert read_aggregation(name) == mode


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match="mean_of_means") as caught:
        read_aggregation("mean_of_means")
    assert "seq_mean_token_mean" in caught.value.hint
    assert "luspo" in caught.value.hint
