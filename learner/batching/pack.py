"""Packing: from sequences to one row of tokens without padding. See `learner.batching.types` for the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch
from rollmesh.learner.batching.routed_experts import join_experts, shares_prompt
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import (
    PackedBatch,
    PackedImages,
    PackedRow,
    PromptImages,
    Segments,
    TrainSequence,
)
from rollmesh.mesh.errors import PayloadError

_CPU = torch.device("cpu")
Scalar = TypeVar("Scalar", bound=np.generic)


def pack(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int] | None = None,
    device: torch.device = _CPU,
    *,
    leave_out_silent: bool = False,
) -> PackedBatch:
    """Packs sequences, with the values that they bring themselves, into a micro-batch.

    Args:
        sequences: the batch.
        indices: which of them, in which order (members of a group side by side); none: all.
        device: where the tensors go.
        leave_out_silent: compute nothing for sequences with advantages of 0; they stay in the counts. Exact for
            losses that vanish with the advantage (`Algorithm.silent_without_advantage`).

    Raises:
        PayloadError: an empty prompt, or arrays of different lengths; names the field.
    """
    sources = range(len(sequences)) if indices is None else indices
    chosen = [sequences[index] for index in sources]
    for source, sequence in zip(sources, chosen, strict=True):
        check_sequence(source, sequence)
    lengths = response_lengths(chosen)
    mask = trained_mask(chosen)
    counts = GlobalCounts(int(mask.sum()), int(_any(mask, lengths).sum()))
    advantages = _spread([sequence.advantages for sequence in chosen], lengths, np.float32)
    if leave_out_silent:
        mask &= np.repeat(_any(advantages != 0, lengths), lengths)
    row = lay_out(chosen, mask, device)
    behaviour, staleness = sampled_values(chosen, mask)
    tokens = TokenBatch(
        sequence_ids=row.sequence_ids,
        sequence_lengths=row.sequence_lengths,
        behaviour_log_probs=to_device(behaviour, device),
        advantages=to_device(advantages[mask], device),
        staleness=to_device(staleness, device),
        sequence_rewards=to_device(np.array([s.reward for s in chosen], dtype=np.float32), device),
    )
    return PackedBatch(row, tokens, counts)


def lay_out(chosen: Sequence[TrainSequence], mask: NDArray[np.bool_], device: torch.device = _CPU) -> PackedRow:
    """Places checked sequences side by side.

    Args:
        chosen: the sequences, members of a group side by side.
        mask: bool [T], which of their response tokens are trained, sequence after sequence.
        device: where the tensors go.
    """
    lengths = response_lengths(chosen)
    ends = lengths.cumsum()
    # Position of each response token in its response, and the sequence it belongs to.
    owner = np.repeat(np.arange(len(chosen)), lengths)
    offset = np.arange(len(mask)) - (ends - lengths)[owner]
    trained_offset, trained_owner = offset[mask], owner[mask]
    # Tokens of each response that go into the model: those before its last trained one.
    inputs = np.zeros(len(chosen), dtype=np.int64)
    np.maximum.at(inputs, trained_owner, trained_offset)
    trained = np.bincount(trained_owner, minlength=len(chosen))
    placed = _place(chosen, inputs, trained > 0)
    experts = join_experts(chosen, inputs, trained > 0)
    segments, prompt_ends, response_starts = placed.segments, placed.prompt_ends, placed.response_starts
    predictors = np.where(
        trained_offset == 0, prompt_ends[trained_owner] - 1, response_starts[trained_owner] + trained_offset - 1
    )
    response_ids = _join([sequence.response_ids for sequence in chosen], np.int32)

    def to(array: NDArray[Any]) -> Tensor:
        return to_device(array, device, torch.int64)

    return PackedRow(
        input_ids=to(placed.ids)[None],
        position_ids=to(_positions(placed)).unsqueeze(-2),
        segments=segments,
        predictors=predictors,
        labels=to(response_ids[mask]),
        temperatures=_temperatures([s.temperature or 1.0 for s in chosen], trained_owner, device),
        sequence_ids=to(trained_owner),
        sequence_lengths=to(trained),
        responses=placed.responses,
        routed_experts=None if experts is None else to_device(experts, device),
        images=_images(placed.pictured, device),
    )


def response_lengths(sequences: Sequence[TrainSequence]) -> NDArray[np.int64]:
    """Response tokens per sequence, int64 [S]."""
    return np.fromiter((len(s.response_ids) for s in sequences), dtype=np.int64, count=len(sequences))


def trained_mask(sequences: Sequence[TrainSequence]) -> NDArray[np.bool_]:
    """Response masks side by side, bool [T]; a copy."""
    return _join([sequence.response_mask for sequence in sequences], np.uint8).astype(bool)


def sampled_values(
    sequences: Sequence[TrainSequence], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Behaviour log-probs and staleness of the trained tokens.

    Args:
        sequences: checked ones.
        mask: bool [T] over their response tokens.

    Returns:
        float32 [R], int32 [R].
    """
    behaviour = _join([sequence.behaviour_log_probs for sequence in sequences], np.float32)
    staleness = _spread([sequence.staleness for sequence in sequences], response_lengths(sequences), np.int32)
    return behaviour[mask], staleness[mask]


def token_rewards(sequences: Sequence[TrainSequence], mask: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    """Rewards of the trained tokens, float32 [R], 0 for sequences without; None where no sequence has some.

    Args:
        sequences: checked ones.
        mask: bool [T] over their response tokens.
    """
    if all(sequence.token_rewards is None for sequence in sequences):
        return None
    parts = [
        np.zeros(len(sequence.response_ids), np.float32) if sequence.token_rewards is None else sequence.token_rewards
        for sequence in sequences
    ]
    return _join(parts, np.float32)[mask]


def check_sequence(index: int, sequence: TrainSequence) -> None:
    """Checks the shapes of a sequence.

    Raises:
        PayloadError: an empty prompt, or arrays of different lengths; names the field.
    """
    count = len(sequence.response_ids)
    if len(sequence.prompt_ids) == 0:
        raise PayloadError(f"sequences[{index}].prompt_ids", "the prompt is empty")
    for name in ("response_mask", "behaviour_log_probs", "advantages", "staleness", "token_rewards"):
        value = getattr(sequence, name)
        if value is not None and not isinstance(value, float | int) and len(value) != count:
            raise PayloadError(f"sequences[{index}].{name}", f"{len(value)} entries for {count} response tokens")


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Prompts and responses side by side.

    Attributes:
        segments: of the row.
        ids: int32 [N].
        prompt_ends: int64 [S], end of each sequence's prompt.
        response_starts: int64 [S], start of each response.
        responses: int64 [segments], see `PackedRow`.
        pictured: prompts with images, by their first place.
        shifts: int64 [segments], see `PromptImages.shift`; 0 for prompts.
    """

    segments: Segments
    ids: NDArray[np.int32]
    prompt_ends: NDArray[np.int64]
    response_starts: NDArray[np.int64]
    responses: NDArray[np.int64]
    pictured: Mapping[int, PromptImages]
    shifts: NDArray[np.int64]


def _place(chosen: Sequence[TrainSequence], inputs: NDArray[np.int64], trained: NDArray[np.bool_]) -> _Placed:
    """Places the prompts and the trained responses."""
    pieces: list[NDArray[np.int32]] = []
    table: list[tuple[int, int, int, int]] = []
    prompt_ends, response_starts, shifts, responses = [], [], [], []
    pictured: dict[int, PromptImages] = {}
    place = prompt_start = prompt_length = prompt = 0
    before: TrainSequence | None = None
    for sequence, count, used in zip(chosen, inputs.tolist(), trained.tolist(), strict=True):
        if not used:
            prompt_ends.append(0)
            response_starts.append(0)
            continue
        if not shares_prompt(sequence, before):
            prompt_start, prompt_length = place, len(sequence.prompt_ids)
            pieces.append(sequence.prompt_ids)
            prompt = len(table)
            table.append((place, prompt_length, 0, 0))
            shifts.append(0)
            responses.append(0)
            if sequence.images is not None:
                pictured[place] = sequence.images
            place += prompt_length
        before = sequence
        responses[prompt] += 1
        prompt_ends.append(prompt_start + prompt_length)
        response_starts.append(place)
        if count:
            pieces.append(sequence.response_ids[:count])
            table.append((place, count, prompt_start, prompt_length))
            shifts.append(0 if sequence.images is None else sequence.images.shift)
            responses.append(1)
            place += count
    columns = np.array(table, dtype=np.int64).reshape(-1, 4).T
    return _Placed(
        Segments(*(np.ascontiguousarray(column) for column in columns)),
        _join(pieces, np.int32),
        np.array(prompt_ends, dtype=np.int64),
        np.array(response_starts, dtype=np.int64),
        np.array(responses, dtype=np.int64),
        pictured,
        np.array(shifts, dtype=np.int64),
    )


def _positions(placed: _Placed) -> NDArray[np.int64]:
    """Positions of all tokens, int64 [N]; or [3, N], where the images of a prompt have a grid."""
    segments = placed.segments
    starts = segments.starts - segments.prefix_lengths - placed.shifts
    plain: NDArray[np.int64] = np.arange(len(placed.ids)) - np.repeat(starts, segments.lengths)
    on_grids = {start: images.positions for start, images in placed.pictured.items() if images.positions is not None}
    if not on_grids:
        return plain
    positions = np.tile(plain, (3, 1))
    for start, of_prompt in on_grids.items():
        positions[:, start : start + of_prompt.shape[1]] = of_prompt
    return positions


def _images(pictured: Mapping[int, PromptImages], device: torch.device) -> PackedImages | None:
    if not pictured:
        return None
    places = np.concatenate([start + images.places for start, images in pictured.items()])
    features = [len(images.places) for images in pictured.values()]
    return PackedImages([images.inputs for images in pictured.values()], features, to_device(places, device))


def _any(flags: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Flags of sequences with a flag on any response token."""
    if not len(flags):
        return np.zeros(len(lengths), dtype=bool)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=flags, minlength=len(lengths)) > 0


def _join(arrays: Sequence[NDArray[Any]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype=dtype)


def _spread(values: Sequence[NDArray[Any] | float], lengths: NDArray[np.int64], dtype: type[Scalar]) -> NDArray[Scalar]:
    """One value per response token, from arrays or from one number per sequence."""
    if all(isinstance(value, float | int) for value in values):
        return np.repeat(np.array(values, dtype=dtype), lengths)
    return _join(
        [np.broadcast_to(np.asarray(v, dtype=dtype), (n,)) for v, n in zip(values, lengths.tolist(), strict=True)],
        dtype,
    )


def _temperatures(values: Sequence[float], owner: NDArray[np.int64], device: torch.device) -> Tensor | float:
    if len(set(values)) <= 1:
        return values[0] if values else 1.0
    return to_device(np.array(values, dtype=np.float32)[owner], device)
