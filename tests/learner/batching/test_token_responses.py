"""Tokens count once for each response that they belong to, whatever computes them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.batching.empty import empty_batch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.sequences import whole_sequences
from rollmesh.learner.batching.token_responses import count_tokens, divide_over_copies, responses_of_tokens
from rollmesh.learner.batching.types import TrainSequence

Lengths = list[tuple[int, list[int]]]
_RESPONSES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
GROUPS = st.lists(st.tuples(st.integers(1, 5), _RESPONSES), min_size=1, max_size=4)


def _sequences(groups: Lengths) -> list[TrainSequence]:
    """Sequences of groups, each given by the length of its prompt and those of its responses."""
    found = []
    for number, (length, responses) in enumerate(groups):
        prompt = np.full(length, number, dtype=np.int32)
        for count in responses:
            ones = np.ones(count, dtype=np.uint8)
            found.append(TrainSequence(prompt, prompt[:1].repeat(count), ones, ones.astype(np.float32)))
    return found


@given(GROUPS)
def test_together_tokens_count_as_often_as_apart(groups: Lengths) -> None:
    sequences = _sequences(groups)
    row = pack(sequences).row
    # The last token of a response predicts nothing.
    expected = sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in sequences)
    assert count_tokens(row) == expected == sum(count_tokens(pack([each]).row) for each in sequences)
    assert responses_of_tokens(row).sum() == expected


@given(GROUPS)
def test_copies_of_a_token_count_as_often_as_the_token(groups: Lengths) -> None:
    row = pack(_sequences(groups)).row
    responses = responses_of_tokens(row)
    places = np.append(whole_sequences(row.segments).side_by_side(), -1)
    found = divide_over_copies(responses, places)
    assert found[-1] == 0
    by_token = np.bincount(places[:-1], found[:-1], minlength=len(responses))
    np.testing.assert_allclose(by_token, responses, rtol=1e-6)


def test_a_micro_batch_that_fills_up_counts_nothing() -> None:
    assert count_tokens(empty_batch(torch.device("cpu")).row) == 0
