"""The sequences of the start-up probe, whatever the engine, and how far its results are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import PackedBatch, TrainSequence

SEED = 20
"""Seed of everything that a probe draws; the same in every process."""
# Prompt and response lengths of the groups: more than one response shares its prompt, one is a single token.
_GROUPS = ((6, (9,)), (11, (7, 12)), (4, (1,)))
# The sequence that stays where its neighbours change: it has some on both sides, and one that shares its prompt.
_WITNESS = 2


@dataclass(frozen=True, slots=True, eq=False)
class ProbeBatches:
    """A few sequences in three arrangements.

    Attributes:
        alone: each in a micro-batch of its own.
        packed: all in one.
        among_others: in one, where all but the witness have other tokens.
        witness: its trained tokens among those of all.
    """

    alone: Sequence[PackedBatch]
    packed: PackedBatch
    among_others: PackedBatch
    witness: slice


def make_probe_batches(vocabulary: int, device: torch.device) -> ProbeBatches:
    """Makes random sequences, the same in every process.

    Args:
        vocabulary: number of tokens.
        device: where they go.
    """
    rng = np.random.default_rng(SEED)
    sequences = _sequences(vocabulary, rng)
    others = _with_other_neighbours(sequences, vocabulary, rng)
    ends = np.cumsum([len(sequence.response_ids) for sequence in sequences])
    return ProbeBatches(
        [pack([sequence], device=device) for sequence in sequences],
        pack(sequences, device=device),
        pack(others, device=device),
        slice(int(ends[_WITNESS - 1]), int(ends[_WITNESS])),
    )


def output_weights() -> Callable[[Tensor], Tensor]:
    """Gives random weights for outputs [R], in the order of the sequences, however they are divided."""
    rng = np.random.default_rng(SEED)

    def draw(outputs: Tensor) -> Tensor:
        return torch.from_numpy(rng.standard_normal(len(outputs), dtype=np.float32)).to(outputs.device)

    return draw


def relative_rms(found: Tensor, truth: Tensor, spread: Tensor) -> Tensor:
    """Root mean square of the differences, over the standard deviation of `spread`."""
    return (found - truth).square().mean().sqrt() / not_zero(spread.std())


def not_zero(value: Tensor) -> Tensor:
    # A new value head gives 0 everywhere, and a model may be flat: equal is 0 over anything.
    return value.clamp_min(torch.finfo(torch.float32).tiny)


def _sequences(vocabulary: int, rng: np.random.Generator) -> list[TrainSequence]:
    """Random sequences, the same on every rank."""
    sequences = []
    for prompt_tokens, responses in _GROUPS:
        prompt = rng.integers(0, vocabulary, prompt_tokens, dtype=np.int32)
        for count in responses:
            response = rng.integers(0, vocabulary, count, dtype=np.int32)
            ones = np.ones(count, dtype=np.uint8)
            sequences.append(TrainSequence(prompt, response, ones, np.zeros(count, dtype=np.float32)))
    return sequences


def _with_other_neighbours(
    sequences: Sequence[TrainSequence], vocabulary: int, rng: np.random.Generator
) -> list[TrainSequence]:
    """Sequences of the same lengths with other tokens, except for the witness and the prompt that it shares."""
    witness = sequences[_WITNESS]
    changed = []
    for sequence in sequences:
        if sequence is not witness:
            ids = rng.integers(0, vocabulary, len(sequence.response_ids), dtype=np.int32)
            sequence = dataclasses.replace(sequence, response_ids=ids)
        if sequence.prompt_ids is not witness.prompt_ids:
            ids = rng.integers(0, vocabulary, len(sequence.prompt_ids), dtype=np.int32)
            sequence = dataclasses.replace(sequence, prompt_ids=ids)
        changed.append(sequence)
    return changed
