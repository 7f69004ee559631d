"""A packed micro-batch as Megatron takes it: whole sequences side by side, divided among context-parallel processes.

A prompt that responses share is computed once for each of them: Megatron's attention knows sequences, not segments.
Sequences are padded at their ends, where causal attention never looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.routed_experts import UNKNOWN
from rollmesh.learner.batching.sequences import whole_sequences
from rollmesh.learner.batching.token_responses import divide_over_copies, responses_of_tokens
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.zigzag import padded_lengths, places_of


@dataclass(frozen=True, slots=True, eq=False)
class MegatronInputs:
    """A micro-batch of this process.

    Attributes:
        batch: of the data-parallel rank.
        input_ids: int64 [1, t], this process's tokens.
        position_ids: int64 [1, t].
        responses: float32 [t], trained responses that each token belongs to; 0 for padding.
        sequences: where sequences begin, for attention.
        predictors: int64 [r], places among the t of the trained tokens' predecessors.
        trained: int64 [r], which of the R trained tokens these predict.
        total: R.
        experts: int16 [t, layers, K], to which generators have routed these tokens, see `PackedRow`.
    """

    batch: PackedBatch
    input_ids: Tensor
    position_ids: Tensor
    responses: Tensor
    sequences: PackedSeqParams
    predictors: Tensor
    trained: Tensor
    total: int
    experts: Tensor | None = None


def prepare_inputs(
    batch: PackedBatch, sizes: ParallelSizes, place: ParallelPlace, device: torch.device, length: int = 0
) -> MegatronInputs:
    """Prepares a micro-batch.

    Args:
        batch: with trained tokens.
        sizes, place: of the process.
        device: where tensors go.
        length: tokens of all sequences with padding; 0: as few as can be divided.
    """
    row = batch.row
    sequences = whole_sequences(row.segments)
    padded = padded_lengths(sequences.lengths, sizes.cp, sizes.tp)
    fillers = _filler_lengths(length - int(padded.sum()), int(padded.max()))
    lengths, padded = (np.concatenate(pair) for pair in ((sequences.lengths, 0 * fillers), (padded, fillers)))
    total = int(padded.sum())
    # Packed tokens by their places side by side (-1: padding), and the reverse.
    real = np.arange(int(lengths.sum())) + np.repeat((padded.cumsum() - padded) - (lengths.cumsum() - lengths), lengths)
    packed = np.full(total, -1, dtype=np.int64)
    packed[real] = sequences.side_by_side()
    beside = np.zeros(row.input_ids.shape[1], dtype=np.int64)
    beside[packed[real]] = real
    positions = np.arange(total) - np.repeat(padded.cumsum() - padded, padded)
    own = places_of(padded, sizes.cp, place.cp)
    source = packed[own]
    ids = row.input_ids[0].index_select(0, to_device(np.maximum(source, 0), device))
    padding = to_device(source < 0, device)
    chosen, trained = _own_predictors(beside[row.predictors], own, total)
    starts = to_device(np.concatenate([[0], padded.cumsum()]), device, torch.int32)
    longest = int(padded.max())
    return MegatronInputs(
        batch=batch,
        input_ids=ids.masked_fill(padding, 0)[None],
        position_ids=to_device(positions[own], device)[None],
        responses=to_device(divide_over_copies(responses_of_tokens(row), packed)[own], device),
        # The same tensor in all places: Transformer Engine compares them, and would have the host wait for others.
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts,
            cu_seqlens_kv_padded=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        predictors=to_device(chosen, device),
        trained=to_device(trained, device),
        total=len(row.predictors),
        experts=None if row.routed_experts is None else _of_tokens(row.routed_experts, source, padding, device),
    )


def padded_tokens(batch: PackedBatch, sizes: ParallelSizes) -> int:
    """Tokens of all sequences of a micro-batch, with the padding that dividing them needs."""
    return int(padded_lengths(whole_sequences(batch.row.segments).lengths, sizes.cp, sizes.tp).sum())


def _of_tokens(experts: Tensor, source: NDArray[np.int64], padding: Tensor, device: torch.device) -> Tensor:
    """The experts of this process's tokens; padding has none."""
    own = experts.index_select(0, to_device(np.maximum(source, 0), device))
    return own.masked_fill(padding[:, None, None], UNKNOWN)


def _filler_lengths(missing: int, longest: int) -> NDArray[np.int64]:
    """Sequences of padding alone; none is longer than the real ones, since attention's cost grows with the square."""
    whole, rest = divmod(max(0, missing), longest)
    return np.array([longest] * whole + [rest] * (rest > 0), dtype=np.int64)


def _own_predictors(
    predictors: NDArray[np.int64], own: NDArray[np.int64], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The predictors that a process has, as places among its tokens; and which they are.

    Args:
        predictors: int64 [R], places among all tokens.
        own: int64 [t], the process's tokens among all.
        total: number of all.
    """
    local = np.full(total, -1, dtype=np.int64)
    local[own] = np.arange(len(own))
    places = local[predictors]
    trained = np.flatnonzero(places >= 0)
    return places[trained], trained
