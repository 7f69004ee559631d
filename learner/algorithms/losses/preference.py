"""Losses on pairs of responses: a chosen and a rejected one to the same prompt.

They take the margin of each pair, z = log(pi(y_w) / pi_ref(y_w)) - log(pi(y_l) / pi_ref(y_l)).

A part for dataflows of pairs: no preset of this package uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rollmesh.learner.algorithms.losses.checks import check_range
from rollmesh.learner.algorithms.losses.drift import WIDE_LOG_RATIO
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import segment_mean, segment_sum


def pair_margins(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    per_token: bool = False,
) -> Tensor:
    """Margins z of pairs of adjacent responses.

    Args:
        log_probs: float [R], with gradient.
        reference_log_probs: float [R].
        sequence_ids: int64 [R]; sequence 2i is the chosen response of pair i, 2i + 1 the rejected one.
        num_sequences: S = 2 P.
        per_token: means over a response's tokens in place of sums (IPO: takes the length out of the margin).

    Returns:
        [P], with gradient.
    """
    combine = segment_mean if per_token else segment_sum
    responses = combine(log_ratio(log_probs, reference_log_probs, WIDE_LOG_RATIO), sequence_ids, num_sequences)
    return responses[0::2] - responses[1::2]


def dpo_sigmoid(margins: Tensor, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta z): DPO, arXiv:2305.18290, eq. 7.

    Args:
        margins: z [P], sums over tokens.
        beta: strength of the implied KL penalty; 0.1 is the paper's.

    Returns:
        [P], with gradient.

    Raises:
        SettingsError: a beta that is not positive.
    """
    check_range("beta", beta, 0.0, open_low=True)
    return -functional.logsigmoid(beta * margins)


def dpo_ipo(margins: Tensor, *, beta: float = 0.1) -> Tensor:
    """(z - 1 / (2 beta))^2: IPO, arXiv:2310.12036, eq. 17, which stays finite where preferences are certain.

    Args:
        margins: z [P]; means over tokens.
        beta: the paper's tau.

    Returns:
        [P], with gradient.

    Raises:
        SettingsError: a beta that is not positive.
    """
    check_range("beta", beta, 0.0, open_low=True)
    return torch.square(margins - 1.0 / (2.0 * beta))
