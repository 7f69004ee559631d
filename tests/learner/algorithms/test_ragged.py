"""Sums per segment and recurrences in time, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms import ragged

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


def randoms(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [R], decays [R] in [0, 1), and values after the last token [S]."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return (
        torch.randn(total, generator=generator, dtype=torch.float64),
        torch.rand(total, generator=generator, dtype=torch.float64),
        torch.randn(len(lengths), generator=generator, dtype=torch.float64),
    )


def scan(inputs: Tensor, decays: Tensor, lengths: list[int], last: Tensor) -> Tensor:
    result, end = inputs.tolist(), sum(lengths)
    for length, behind in zip(reversed(lengths), reversed(last.tolist()), strict=True):
        carry = behind
        for place in range(end - 1, end - length - 1, -1):
            carry = result[place] = float(inputs[place]) + float(decays[place]) * carry
        end -= length
    return torch.tensor(result, dtype=torch.float64)


@given(lengths=LENGTHS, seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_scans_are_the_plain_loop(lengths: list[int], seed: int):
    inputs, decays, last = randoms(lengths, seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    found = ragged.reverse_scan(inputs, decays, sizes, last)
    torch.testing.assert_close(found, scan(inputs, decays, lengths, last))
    constant = ragged.reverse_scan(inputs, 0.9, sizes)
    torch.testing.assert_close(constant, scan(inputs, torch.full_like(inputs, 0.9), lengths, torch.zeros_like(last)))


@pytest.mark.parametrize("lengths", [[1], [64], [65], [4096], [4097], [20_000], [16_384, 1, 0, 5_000]])
def test_scans_cross_blocks(lengths: list[int]):
    inputs, decays, last = randoms(lengths)
    decays = 1 - 0.01 * decays
    found = ragged.reverse_scan(inputs, decays, torch.tensor(lengths), last)
    torch.testing.assert_close(found, scan(inputs, decays, lengths, last))


def test_scans_leave_their_inputs_alone():
    inputs, decays, last = randoms([3, 4])
    before = inputs.clone(), decays.clone(), last.clone()
    ragged.reverse_scan(inputs, decays, torch.tensor([3, 4]), last)
    for now, then in zip((inputs, decays, last), before, strict=True):
        assert torch.equal(now, then)


def test_what_overflows_in_one_sequence_stays_there():
    lengths = torch.tensor([200, 300, 2])
    decays = torch.full((502,), 0.5)
    decays[200:500] = 1e8
    found = ragged.reverse_scan(torch.ones(502), decays, lengths)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:200], ragged.reverse_scan(torch.ones(200), 0.5, torch.tensor([200])))
    assert found[500:].tolist() == [1.5, 1.0]


def test_a_decay_of_zero_shuts_out_products_that_overflow():
    decays = torch.full((5000,), 1e30)
    decays[::7] = 0.0
    found = ragged.reverse_scan(torch.ones(5000), decays, torch.tensor([5000]))
    assert found.isfinite().all()
    assert (found[::7] == 1.0).all()


@given(lengths=LENGTHS)
@settings(max_examples=40)
def test_sums_over_sequences(lengths: list[int]):
    values, _, scales = randoms(lengths)
    values.requires_grad_()
    sizes = torch.tensor(lengths, dtype=torch.int64)
    sums = ragged.sequence_sum(values, sizes)
    parts = values.split(lengths) if lengths else ()
    torch.testing.assert_close(sums.tolist(), [float(part.detach().sum()) for part in parts])
    (sums * scales).sum().backward()
    torch.testing.assert_close(values.grad, ragged.expand(scales, sizes, sum(lengths)))
    means = ragged.sequence_mean(values.detach(), sizes)
    torch.testing.assert_close(means.tolist(), [float(part.detach().mean()) if len(part) else 0.0 for part in parts])
    running = ragged.running_sums(values.detach(), sizes)
    torch.testing.assert_close(
        running.tolist(), [value for part in parts for value in part.detach().cumsum(0).tolist()]
    )


@given(lengths=LENGTHS)
def test_positions_last_tokens_and_shifts(lengths: list[int]):
    values, _, last = randoms(lengths)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    assert ragged.positions(sizes).tolist() == [t for length in lengths for t in range(length)]
    places, sequences = ragged.last_tokens(sizes)
    assert sequences.tolist() == [i for i, length in enumerate(lengths) if length]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()
    assert places.tolist() == [end - 1 for end, length in zip(ends, lengths, strict=True) if length]
    expected = [
        value
        for part, behind in zip(values.split(lengths) if lengths else (), last.tolist(), strict=True)
        for value in ([*part[1:].tolist(), behind] if len(part) else [])
    ]
    assert ragged.shift_left(values, sizes, last).tolist() == expected


@given(segments=st.lists(st.integers(0, 4), max_size=20))
def test_statistics_per_segment(segments: list[int]):
    generator = torch.Generator().manual_seed(len(segments))
    values = torch.randn(len(segments), generator=generator, dtype=torch.float64)
    ids = torch.tensor(segments, dtype=torch.int64)
    parts = [values[ids == segment] for segment in range(5)]
    sums, means = ragged.segment_sum(values, ids, 5), ragged.segment_mean(values, ids, 5)
    torch.testing.assert_close(sums, torch.stack([part.sum() for part in parts]))
    torch.testing.assert_close(means.tolist(), [float(part.mean()) if len(part) else 0.0 for part in parts])
    assert ragged.segment_count(ids, 5).tolist() == [len(part) for part in parts]
    highest = [float(part.max()) if len(part) else -torch.inf for part in parts]
    assert ragged.segment_max(values, ids, 5).tolist() == highest
    assert ragged.segment_min(values, ids, 5).tolist() == [
        float(part.min()) if len(part) else torch.inf for part in parts
    ]


def test_several_columns_at_once():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert ragged.segment_mean(values, torch.tensor([1, 1, 0]), 3).tolist() == [[5.0, 6.0], [2.0, 3.0], [0.0, 0.0]]
