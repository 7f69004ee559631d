"""The experts to which generators have routed tokens, in the order of a packed row. See `learner.batching.types`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import TrainSequence

Experts = NDArray[np.int16]
UNKNOWN = -1
"""In the place of an expert: it is not known to which one a token was routed."""


def shares_prompt(sequence: TrainSequence, before: TrainSequence | None) -> bool:
    """True where a sequence follows another one with the same prompt, which a packed row has once.

    Equal tokens stand for other images where these are not the same.
    """
    if before is None or sequence.images is not before.images:
        return False
    return sequence.prompt_ids is before.prompt_ids or np.array_equal(sequence.prompt_ids, before.prompt_ids)


def join_experts(chosen: Sequence[TrainSequence], inputs: NDArray[np.int64], used: NDArray[np.bool_]) -> Experts | None:
    """The experts of the tokens that are computed.

    Args:
        chosen: the sequences, members of a group side by side.
        inputs: int64 [S], tokens of each response that are computed.
        used: bool [S], sequences that are computed at all.

    Returns:
        [N, layers, K], `UNKNOWN` where the generator has not said it; None: it has said it of no token.
    """
    known = [part for s in chosen for part in (s.prompt_experts, s.response_experts) if part is not None]
    if not known:
        return None
    like = known[0]
    pieces = []
    before: TrainSequence | None = None
    for sequence, count, computed in zip(chosen, inputs.tolist(), used.tolist(), strict=True):
        if not computed:
            continue
        if not shares_prompt(sequence, before):
            pieces.append(_of_tokens(sequence.prompt_experts, len(sequence.prompt_ids), like))
        before = sequence
        pieces.append(_of_tokens(sequence.response_experts, count, like))
    return np.concatenate(pieces) if pieces else None


def _of_tokens(experts: Experts | None, count: int, like: Experts) -> Experts:
    """The experts of the first tokens; `UNKNOWN` where there are too few."""
    found = np.full((count, *like.shape[1:]), UNKNOWN, dtype=np.int16)
    if experts is not None:
        found[: len(experts)] = experts[:count]
    return found
