"""The policy gradient itself, without a ratio (REINFORCE, GPG), and with a quadratic pull to the anchor (DRO)."""

from __future__ import annotations

from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_range
from rollmesh.learner.algorithms.losses.drift import WIDE_LOG_RATIO, drift_metrics
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import finite_log_probs, log_ratio
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import TokenBatch


@register_policy_loss("gpg", silent_without_advantage=True, anchored=False)
@register_policy_loss("reinforce", silent_without_advantage=True, anchored=False)
def reinforce(log_probs: Tensor, anchor_log_probs: Tensor, tokens: TokenBatch) -> tuple[Tensor, Metrics]:
    """L = -A log pi.

    REINFORCE (Williams, 1992), and GPG, arXiv:2504.02546, which is the same loss under its own advantages. Off-policy
    tokens are right in expectation with importance weights, which are applied outside; weights by the current policy
    instead of the proximal one are `cispo`.

    Args:
        log_probs: float [R], with gradient; -inf counts as -10000, without gradient.
        anchor_log_probs: float [R]; only reported.
        tokens: advantages [R].

    Returns:
        Loss per token [R], and drift from the anchor.
    """
    return -tokens.advantages * finite_log_probs(log_probs), drift_metrics(log_ratio(log_probs, anchor_log_probs))


@register_policy_loss("dro", on_ratio=("beta",))
def dro(
    log_probs: Tensor, anchor_log_probs: Tensor, tokens: TokenBatch, *, beta: float = 0.05
) -> tuple[Tensor, Metrics]:
    """L = -(A log pi - beta/2 (log pi - log pi_anchor)^2).

    The regression of the optimal policy's log-ratio on the advantage, per token: its gradient vanishes at
    log(pi / pi_anchor) = A / beta. DRO, arXiv:2405.19107, sec. 3. It pulls tokens of advantage 0 back as well.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R].
        beta: strength of the pull, as of a KL penalty; 0.05 is verl's.

    Returns:
        Loss per token [R], and metrics: the squared log-ratio (`actor/log_ratio_squared`), drift from the anchor.

    Raises:
        SettingsError: a negative beta.
    """
    check_range("beta", beta, 0.0)
    log_ratios = log_ratio(log_probs, anchor_log_probs, WIDE_LOG_RATIO)
    squares = log_ratios.square()
    loss = 0.5 * beta * squares - tokens.advantages * finite_log_probs(log_probs)
    return loss, Metrics(sums={"actor/log_ratio_squared": squares.detach().sum()}) | drift_metrics(log_ratios)
