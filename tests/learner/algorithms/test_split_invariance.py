"""Every registered policy loss, and every aggregation: shares of any split of the batch add up to the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.learner.algorithms.aggregation import AGGREGATIONS, aggregate
from tests.learner.algorithms.samples import EVERY_LOSS, gradient, label, sample, select, token_loss


@pytest.mark.parametrize("component", EVERY_LOSS, ids=label)
@settings(max_examples=7)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
    by_token=st.booleans(),
    mode=st.sampled_from(AGGREGATIONS),
)
def test_shares_add_up_to_the_loss_and_gradient_of_the_whole(component, sequences, seed, by_token, mode):
    lengths = [length for length, _ in sequences]
    homes = torch.tensor([home for _, home in sequences])
    whole = sample(lengths, seed, by_token=by_token)
    select(component, whole)
    whole_loss, leaf, whole_metrics = token_loss(component, whole)
    split = [torch.nonzero(homes == home).squeeze(1) for home in range(3)]
    parts = [token_loss(component, whole.part(part)) for part in split]
    expected = aggregate(whole_loss, whole.tokens, whole.counts, mode, horizon=6.0)
    expected_gradient = gradient(expected, leaf)
    shares, gradients = [], torch.zeros_like(leaf)
    for part, (loss, part_leaf, _) in zip(split, parts, strict=True):
        share = aggregate(loss, whole.part(part).tokens, whole.counts, mode, horizon=6.0)
        shares.append(share.detach())
        gradients[torch.isin(whole.tokens.sequence_ids, part)] = gradient(share, part_leaf)
    torch.testing.assert_close(torch.stack(shares).sum(), expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients, expected_gradient, rtol=1e-9, atol=1e-9)
    for name, total in whole_metrics.sums.items():
        together = torch.stack([metrics.sums[name].double() for _, _, metrics in parts]).sum()
        torch.testing.assert_close(together, total.double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("component", EVERY_LOSS, ids=label)
def test_the_gradient_is_not_trivial(component):
    data = sample([3, 4, 2, 5], seed=3)
    select(component, data)
    loss, leaf, _ = token_loss(component, data)
    assert gradient(loss.sum(), leaf).abs().sum() > 0
