"""Packing: each trained token is predicted from the token before it, with its own data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.fsdp2.attention_calls import build_layout
from rollmesh.mesh.errors import PayloadError


@st.composite
def batches(draw) -> list[TrainSequence]:
    sequences = []
    identity = 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = np.arange(identity, identity + draw(st.integers(1, 5)), dtype=np.int32)
        identity += len(prompt)
        for _ in range(draw(st.integers(1, 4))):
            count = draw(st.integers(1, 6))
            # Every token id is unique, so ids tell where a token came from.
            ids = np.arange(identity, identity + count, dtype=np.int32)
            identity += count
            mask = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), dtype=np.uint8)
            sequences.append(
                TrainSequence(
                    prompt, ids, mask, -ids.astype(np.float32), ids.astype(np.float32) * 2, ids, 0.5 + identity
                )
            )
    return sequences


@given(sequences=batches())
def test_trained_tokens_are_predicted_by_their_predecessors(sequences):
    packed = pack(sequences)
    ids = packed.row.input_ids[0].numpy()
    row = 0
    for number, sequence in enumerate(sequences):
        whole = np.concatenate([sequence.prompt_ids, sequence.response_ids])
        for t in np.nonzero(sequence.response_mask)[0]:
            token = sequence.response_ids[t]
            place = int(packed.row.predictors[row])
            assert packed.row.labels[row] == token
            assert ids[place] == whole[len(sequence.prompt_ids) + t - 1]
            assert packed.row.position_ids[0, place] == len(sequence.prompt_ids) + t - 1
            assert packed.tokens.sequence_ids[row] == number
            assert packed.tokens.behaviour_log_probs[row] == -float(token)
            assert packed.tokens.advantages[row] == 2.0 * token
            assert packed.tokens.staleness[row] == token
            temperatures = packed.row.temperatures
            found = temperatures if isinstance(temperatures, float) else float(temperatures[row])
            assert found == pytest.approx(sequence.temperature)
            row += 1
    assert row == packed.tokens.num_tokens
    assert packed.tokens.sequence_lengths.tolist() == [int(s.response_mask.sum()) for s in sequences]


@given(sequences=batches(), waste=st.sampled_from([0, 10, 10_000]))
def test_attention_sees_a_sequences_own_past_and_nothing_else(sequences, waste):
    packed = pack(sequences)
    layout = build_layout(packed.row.segments, torch.device("cpu"), waste)
    ids = packed.row.input_ids[0]
    seen: dict[int, list[int]] = {}
    for call in layout.calls:
        count, rows, columns = call.shape
        mask = call.mask(None, torch.float32)
        if mask is None:
            mask = torch.full((rows, columns), -torch.inf).triu(1).expand(count, 1, rows, columns)
        queries, keys = call.queries.view(count, rows), call.keys.view(count, columns)
        for b in range(count):
            real = int(call.key_lengths[b] - call.prefix_lengths[b])
            for i in range(real):
                visible = keys[b][mask[b, 0, i] == 0]
                assert int(queries[b, i]) not in seen
                seen[int(queries[b, i])] = ids[visible].tolist()
    assert sorted(seen) == list(range(packed.num_tokens))
    contexts = {tuple(visible) for visible in seen.values()}
    for sequence in sequences:
        whole = np.concatenate([sequence.prompt_ids, sequence.response_ids]).tolist()
        trained = np.nonzero(sequence.response_mask)[0]
        needed = len(sequence.prompt_ids) + int(trained[-1]) if len(trained) else 0
        for length in range(1, needed + 1):
            assert tuple(whole[:length]) in contexts


def test_a_groups_prompt_is_packed_once():
    sequence = TrainSequence(*_arrays(prompt=5, response=3))
    packed = pack([sequence] * 4)
    # One prompt, and per response the two tokens that predict something.
    assert packed.num_tokens == 5 + 4 * 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_ids": np.zeros(0, dtype=np.int32)}, "prompt_ids"),
        ({"response_mask": np.ones(2, dtype=np.uint8)}, "response_mask"),
        ({"behaviour_log_probs": np.zeros(4, dtype=np.float32)}, "behaviour_log_probs"),
        ({"advantages": np.zeros(4, dtype=np.float32)}, "advantages"),
        ({"staleness": np.zeros(1, dtype=np.int32)}, "staleness"),
    ],
)
def test_wrong_lengths_are_named(changes, field):
    good = TrainSequence(*_arrays(prompt=2, response=3))
    with pytest.raises(PayloadError) as caught:
        pack([good, dataclasses.replace(good, **changes)])
    assert caught.value.field == f"sequences[1].{field}"


def _arrays(prompt: int, response: int):
    return (
        np.arange(prompt, dtype=np.int32),
        np.arange(response, dtype=np.int32),
        np.ones(response, dtype=np.uint8),
        np.zeros(response, dtype=np.float32),
    )
