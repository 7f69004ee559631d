"""Losses of preferences: pairs of a chosen and a rejected response to the same prompt, or single ones with a label.

They take the log-ratio of each response, h = log(pi(y) / pi_ref(y)), and for pairs the margin z = h(y_w) - h(y_l).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rollmesh.learner.algorithms.losses.checks import check_range
from rollmesh.learner.algorithms.ragged import segment_sum


def response_log_ratios(log_probs: Tensor, reference: Tensor, sequence_ids: Tensor, lengths: Tensor) -> Tensor:
    """Log-ratios h of responses, summed over their tokens.

    Args:
        log_probs: float [R], with gradient.
        reference: float [S], sums of the reference policy's log-probs.
        sequence_ids: int64 [R], the response of every token.
        lengths: int64 [S], trained tokens per response.

    Returns:
        [S], with gradient.
    """
    return segment_sum(log_probs, sequence_ids, lengths.numel()) - reference


def pair_margins(log_ratios: Tensor) -> Tensor:
    """Margins z of pairs of adjacent responses.

    Args:
        log_ratios: h [2 P]; entry 2i is of the chosen response of pair i, 2i + 1 of the rejected one. IPO takes means
            over a response's tokens in place of sums, which takes the length out of the margin.

    Returns:
        [P], with gradient.
    """
    return log_ratios[0::2] - log_ratios[1::2]


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


def kto(log_ratios: Tensor, desirable: Tensor, divergence: float, *, beta: float = 0.1) -> Tensor:
    """1 - sigmoid(beta (h - z0)) for good responses, and with z0 - h for bad ones: KTO, arXiv:2402.01306, eq. 8.

    Args:
        log_ratios: h [S], sums over tokens.
        desirable: bool [S], the good ones.
        divergence: z0, an estimate of KL(pi || pi_ref) over the whole batch, not negative.
        beta: the paper's.

    Returns:
        [S], with gradient, without weights.

    Raises:
        SettingsError: a beta that is not positive.
    """
    check_range("beta", beta, 0.0, open_low=True)
    advantage = beta * (log_ratios - divergence)
    return 1.0 - torch.sigmoid(torch.where(desirable, advantage, -advantage))


def bradley_terry(scores: Tensor, margins: Tensor, *, centering: float = 0.0) -> Tensor:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2: a reward model's loss, arXiv:2203.02155, eq. 1.

    The margin m is that of arXiv:2307.09288, eq. 2, and the term of weight c that of arXiv:2312.09244.

    Args:
        scores: r [2 P]; entry 2i is of the chosen response of pair i, 2i + 1 of the rejected one.
        margins: m [P], by how much the chosen one should be better; 0: at all.
        centering: c.

    Returns:
        [P], with gradient.

    Raises:
        SettingsError: a negative weight.
    """
    check_range("centering", centering, 0.0)
    chosen, rejected = scores[0::2], scores[1::2]
    loss = -functional.logsigmoid(chosen - rejected - margins)
    return loss + centering * torch.square(chosen + rejected) if centering else loss
