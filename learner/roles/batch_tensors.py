"""A batch as named tensors: its sequences, and the fields of its rollouts that a loss reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.types import Rollouts
from rollmesh.learner.distributed.batch_sequences import BatchSequences
from rollmesh.learner.roles.tensor_parts import Arrays

_SEQUENCES, _ROLLOUTS, _EXTRA = "sequences.", "rollouts.", "extra."
# A loss gets its values of these (`TokenBatch`), and a step its tokens.
_ALWAYS = ("behaviour_log_probs", "staleness", "rewards")
_OPTIONAL = (
    "advantages",
    "proximal_log_probs",
    "reference_log_probs",
    "importance_weights",
    "values",
    "returns",
    "keep",
    "repeats",
)


def sequence_tensors(sequences: BatchSequences) -> Arrays:
    """The sequences of a batch by name."""
    return {f"{_SEQUENCES}{name}": array for name, array in sequences.arrays().items()}


def to_sequences(tensors: Mapping[str, NDArray[Any]]) -> BatchSequences:
    """Inverse of `sequence_tensors`; other tensors are ignored.

    Raises:
        TypeError: one is missing.
    """
    return BatchSequences(**_below(tensors, _SEQUENCES))


def holds_sequences(tensors: Mapping[str, NDArray[Any]]) -> bool:
    """True if some of the tensors are of sequences."""
    return any(name.startswith(_SEQUENCES) for name in tensors)


def rollout_tensors(rollouts: Rollouts) -> Arrays:
    """The fields of the rollouts that a loss reads, as they are now, by name."""
    fields: dict[str, Tensor | None] = {name: getattr(rollouts, name) for name in (*_ALWAYS, *_OPTIONAL)}
    fields |= {f"{_EXTRA}{name}": values for name, values in rollouts.extra.items()}
    return {
        f"{_ROLLOUTS}{name}": values.detach().cpu().numpy() for name, values in fields.items() if values is not None
    }


def to_rollouts(
    tensors: Mapping[str, NDArray[Any]], groups: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device
) -> Rollouts:
    """Inverse of `rollout_tensors`; fields that are not there are 0, or absent where they may be.

    Args:
        tensors: by name; others are ignored.
        groups: int64 [S], the group of each sequence.
        lengths: int64 [S], trained tokens of each sequence.
        device: of the result.
    """
    found = {name: torch.from_numpy(array).to(device) for name, array in _below(tensors, _ROLLOUTS).items()}
    tokens, sequences = int(lengths.sum()), len(lengths)
    rollouts = Rollouts(
        group_ids=torch.from_numpy(groups).to(device),
        rewards=torch.zeros(sequences, device=device),
        lengths=torch.from_numpy(lengths).to(device),
        behaviour_log_probs=torch.zeros(tokens, device=device),
        staleness=torch.zeros(tokens, dtype=torch.int32, device=device),
        truncated=torch.zeros(sequences, dtype=torch.bool, device=device),
    )
    for name, values in found.items():
        if name.startswith(_EXTRA):
            rollouts.extra[name.removeprefix(_EXTRA)] = values
        elif name in _ALWAYS or name in _OPTIONAL:
            setattr(rollouts, name, values)
    return rollouts


def _below(tensors: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
