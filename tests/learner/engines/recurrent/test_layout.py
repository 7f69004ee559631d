"""The calls of recurrent layers hold every sequence whole, in order, with little padding."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.fsdp2.recurrent.layout import build_recurrent_layout
from tests.learner.engines.models import make_sequences

CPU = torch.device("cpu")


@given(
    seed=st.integers(0, 1 << 16),
    groups=st.integers(1, 4),
    longest=st.sampled_from([1, 12, 300]),
    boundaries=st.booleans(),
)
def test_a_token_stands_behind_what_precedes_it_in_its_sequence(seed, groups, longest, boundaries):
    segments = pack(make_sequences(seed, groups=groups, longest=longest)).row.segments
    layout = build_recurrent_layout(segments, CPU, boundaries=boundaries)
    gathered = torch.cat([call.tokens.flatten() for call in layout.calls]).tolist()
    begins = _first_places(layout.calls)
    columns = (segments.starts, segments.lengths, segments.prefix_starts, segments.prefix_lengths)
    for start, length, prefix, context in zip(*(column.tolist() for column in columns), strict=True):
        last = layout.places[start + length - 1]
        first = int(last) - length - context + 1
        assert gathered[first : int(last) + 1] == [*range(prefix, prefix + context), *range(start, start + length)]
        assert layout.places[start : start + length].tolist() == list(range(first + context, int(last) + 1))
        assert first in begins


def _first_places(calls) -> set[int]:
    """Where sequences begin among the tokens of all calls."""
    begins, base = set(), 0
    for call in calls:
        if call.boundaries:
            begins |= set(call.boundaries["cu_seq_lens_q"].tolist())
            owners = torch.repeat_interleave(call.boundaries["cu_seq_lens_q"].diff())
            assert torch.equal(call.boundaries["seq_idx"][0].long(), owners)
        else:
            begins |= {base + row * call.tokens.shape[1] for row in range(len(call.tokens))}
        base += call.tokens.numel()
    return begins


def test_sequences_of_similar_length_share_a_call():
    row = pack(make_sequences(1, groups=8) + make_sequences(2, groups=2, longest=4000, gaps=False)).row
    calls = build_recurrent_layout(row.segments, CPU, boundaries=False).calls
    (unpadded,) = build_recurrent_layout(row.segments, CPU, boundaries=True).calls
    assert 2 <= len(calls) <= 6
    assert sum(call.tokens.numel() for call in calls) <= 1.25 * unpadded.tokens.numel() + 256 * len(calls)
