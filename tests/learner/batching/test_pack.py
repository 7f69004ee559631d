"""Packing: each trained token is predicted from the token before it, with its own data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import PromptImages, TrainSequence
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


def _pictured(images: PromptImages | None, prompt: int = 5, response: int = 3) -> TrainSequence:
    ids, zeros = np.arange(response, dtype=np.int32), np.zeros(response, dtype=np.float32)
    return TrainSequence(np.zeros(prompt, np.int32), ids, np.ones(response, np.uint8), zeros, images=images)


def test_equal_prompts_with_other_images_are_placed_apart():
    """Their tokens are the same; what these stand for is not."""
    one, other = (PromptImages({"pixel_values": torch.full((1, 2), value)}, np.array([1, 2])) for value in (1.0, 2.0))
    row = pack([_pictured(one), _pictured(one), _pictured(other), _pictured(None)]).row
    assert row.segments.prefix_lengths.tolist() == [0, 5, 5, 0, 5, 0, 5]
    assert row.images is not None
    assert [inputs["pixel_values"].tolist() for inputs in row.images.inputs] == [[[1.0, 1.0]], [[2.0, 2.0]]]
    second = 5 + 2 + 2
    assert row.images.places.tolist() == [1, 2, second + 1, second + 2]
    assert pack([_pictured(None)]).row.images is None


def test_responses_continue_after_the_largest_position_of_an_image():
    grid = np.array([[0, 1, 1, 1, 3], [0, 1, 1, 2, 3], [0, 1, 2, 1, 3]])
    images = PromptImages({}, np.array([1, 2, 3]), grid)
    row = pack([_pictured(images), _pictured(None)]).row
    assert row.position_ids.shape == (3, 1, 14)
    assert row.position_ids[:, 0, :5].tolist() == grid.tolist()
    assert row.position_ids[:, 0, 5:].tolist() == [[4, 5, 0, 1, 2, 3, 4, 5, 6]] * 3
