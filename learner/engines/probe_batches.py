"""The sequences of the start-up probe, whatever the engine, and how far its results are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import PackedBatch, PromptImages, TrainSequence

SEED = 20
"""Seed of everything that a probe draws; the same in every process."""
# Prompt and response lengths of the groups: more than one response shares its prompt, one is a single token.
_GROUPS = ((6, (9,)), (11, (7, 12)), (4, (1,)))
# Prompts with an image: the first ones.
_PICTURED = 2
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


@dataclass(frozen=True, slots=True)
class ProbeImages:
    """The way of images into a probe.

    Attributes:
        token: stands for a feature of an image; no other token is that one.
        add: gives a prompt an image that depends on a seed: from int32 [P] to a longer prompt and its images.
    """

    token: int
    add: Callable[[NDArray[np.int32], int], tuple[NDArray[np.int32], PromptImages]]


def make_probe_batches(vocabulary: int, device: torch.device, images: ProbeImages | None = None) -> ProbeBatches:
    """Makes random sequences, the same in every process.

    Args:
        vocabulary: number of tokens.
        device: where they go.
        images: of a model that takes them: some prompts have one, others have none.
    """
    rng = np.random.default_rng(SEED)
    sequences = _sequences(vocabulary, rng)
    others = _with_other_neighbours(sequences, vocabulary, rng)
    if images is not None:
        kept = sequences[_WITNESS].prompt_ids
        sequences = _with_images(sequences, images, kept, SEED)
        others = _with_images(others, images, kept, SEED + _PICTURED)
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


def _with_images(
    sequences: Sequence[TrainSequence], images: ProbeImages, kept: NDArray[np.int32], seed: int
) -> list[TrainSequence]:
    """Sequences of which the first prompts have an image, that of `kept` the same for every seed."""
    found: dict[int, tuple[NDArray[np.int32], PromptImages | None]] = {}
    pictured = []
    for sequence in sequences:
        prompt, response = (_without(ids, images.token) for ids in (sequence.prompt_ids, sequence.response_ids))
        if (key := id(sequence.prompt_ids)) not in found:
            own = SEED if sequence.prompt_ids is kept else seed + 1 + len(found)
            found[key] = images.add(prompt, own) if len(found) < _PICTURED else (prompt, None)
        ids, of_prompt = found[key]
        pictured.append(dataclasses.replace(sequence, prompt_ids=ids, response_ids=response, images=of_prompt))
    return pictured


def _without(ids: NDArray[np.int32], token: int) -> NDArray[np.int32]:
    """Tokens with another one in place of the given one."""
    return np.where(ids == token, np.int32(token - 1 if token else 1), ids).astype(np.int32)
