"""The gathering of packed tokens for recurrent layers: pure index arithmetic.

A recurrent layer needs every sequence whole, its prompt included, and apart from the others. Kernels that know
boundaries take all sequences in one row, without padding. Otherwise sequences of similar length form one padded call.
Rows are padded on the right, which such a layer never sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.sequences import Sequences, whole_sequences
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments

# Padding that a call may hold: this share of its real tokens, or this many, which cost less than another call.
_PADDING = 0.25
_FEW = 256


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """A call of a recurrent layer.

    Attributes:
        tokens: int64 [S, L], places among the N packed tokens; padding repeats place 0.
        boundaries: of the sequences in a single row, under the names that layers of transformers know: `cu_seq_lens_q`,
            int32 [sequences + 1], and `seq_idx`, int32 [1, L]. Empty: every row is one sequence.
    """

    tokens: Tensor
    boundaries: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecurrentLayout:
    """The calls of a packed micro-batch.

    Attributes:
        calls: hold every sequence once, with its prompt.
        places: int64 [N], where each packed token stands among the tokens of all calls, row after row; one place of
            those that a prompt has.
    """

    calls: tuple[RecurrentCall, ...]
    places: Tensor


def build_recurrent_layout(segments: Segments, device: torch.device, *, boundaries: bool) -> RecurrentLayout:
    """Forms the calls.

    Args:
        segments: of the packed micro-batch.
        device: where the indices go.
        boundaries: the layers' kernels know boundaries of sequences.
    """
    sequences = whole_sequences(segments)
    places = np.zeros(int(segments.lengths.sum()), dtype=np.int64)
    if boundaries:
        tokens, lengths = sequences.side_by_side(), sequences.lengths
        places[tokens] = np.arange(len(tokens))
        named = {
            "cu_seq_lens_q": to_device(np.concatenate(([0], lengths.cumsum())), device, torch.int32),
            "seq_idx": to_device(np.repeat(np.arange(len(lengths)), lengths), device, torch.int32)[None],
        }
        calls = [RecurrentCall(to_device(tokens, device)[None], named)]
    else:
        calls = []
        base = 0
        for members in _similar(sequences):
            tokens, real = sequences.in_rows(members)
            places[tokens[real]] = base + np.flatnonzero(real.ravel())
            base += tokens.size
            calls.append(RecurrentCall(to_device(tokens, device)))
    return RecurrentLayout(tuple(calls), to_device(places, device))


def _similar(sequences: Sequences) -> Iterator[NDArray[np.int64]]:
    """Sequences of similar length together, the longest first."""
    order = np.argsort(-sequences.lengths, kind="stable")
    lengths = sequences.lengths[order]
    start = total = 0
    for end, length in enumerate(lengths.tolist()):
        real = total + length
        if (end + 1 - start) * int(lengths[start]) - real > max(_FEW, _PADDING * real):
            yield order[start:end]
            start, real = end, length
        total = real
    yield order[start:]
