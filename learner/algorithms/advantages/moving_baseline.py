"""A moving average of past rewards as baseline, one per role: for self-play, where a prompt has no group.

A part for dataflows of self-play: no preset of this package uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import last_tokens, reverse_scan, segment_count, shift_left


def moving_baseline(rewards: Tensor, roles: Tensor, state: Tensor, *, decay: float = 0.95) -> tuple[Tensor, Tensor]:
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119).

    In order, for every trajectory of role k: A = r - b_k, then b_k = decay * b_k + (1 - decay) * r. Computed for all
    roles at once, as a recurrence in time.

    Args:
        rewards: float [S], in the order in which they arrived.
        roles: int64 [S], 0 .. K-1.
        state: float [K], the baselines before the first of them; zeros at the start of a run.
        decay: of the average; the paper's 0.95.

    Returns:
        advantages [S], and the baselines [K] after the last of them.
    """
    order = torch.argsort(roles, stable=True, descending=True).flip(0)
    # Newest first within a role: the scan goes backwards in time, that is forwards through the trajectories.
    lengths = segment_count(roles, state.numel())
    newest_first = rewards[order]
    averages = reverse_scan((1.0 - decay) * newest_first, decay, lengths, state)
    before = shift_left(averages, lengths, state)
    advantages = torch.empty_like(rewards)
    advantages[order] = newest_first - before
    after = state.clone()
    _, sequences = last_tokens(lengths)
    firsts = (lengths.cumsum(0) - lengths)[sequences]
    after[sequences] = averages[firsts]
    return advantages, after
