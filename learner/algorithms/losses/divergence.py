"""Trust regions in probabilities instead of ratios: tokens that would leave the region are dropped.

A ratio of 2 is nothing for a token of probability 1e-6 and everything for one of 0.4. A difference of probabilities, or
the divergence between the two Bernoulli distributions "this token or another", separates them. DPPO, "Rethinking the
Trust Region in LLM Reinforcement Learning", arXiv:2602.04879.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.checks import check_range
from rollmesh.learner.algorithms.losses.drift import WIDE_LOG_RATIO, drift_metrics
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import finite_log_probs, log_ratio
from rollmesh.learner.algorithms.registry import register_policy_loss
from rollmesh.learner.algorithms.types import TokenBatch

# Keeps log(1 - p) finite where p = 1, which float32 reaches easily.
_EPSILON = 1e-8
# Ratios that are dropped by probability instead of clipped may be large: e^60 still adds up within float32.
_FREE_LOG_RATIO = 60.0


@register_policy_loss("dppo_tv", silent_without_advantage=True, on_ratio=("clip_low", "clip_high", "ratio_cap"))
def dppo_tv(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """Divergence PPO with the binary total variation.

    With p, q the token's probabilities under the current policy and the anchor: a token is kept while
    `p - q <= clip_high` where A > 0, and `p - q >= -clip_low` elsewhere. `L = -A sg(min(p / q, ratio_cap)) log p` for
    kept tokens, 0 for others. arXiv:2602.04879, sec. 4 (Binary-TV).

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R]; the paper anchors at the behaviour policy.
        tokens: advantages [R].
        clip_low, clip_high: how far the probability may fall and rise; 0.15 is the authors'.
        ratio_cap: largest weight of a token; wide, as the region is what bounds the step.

    Returns:
        Loss per token [R], and metrics: tokens dropped (`actor/pg_clipfrac`), kept tokens with a capped weight
        (`actor/pg_clipfrac_lower`), as verl names them; drift from the anchor.

    Raises:
        SettingsError: a bound out of range.
    """
    check_range("clip_low", clip_low, 0.0)
    check_range("clip_high", clip_high, 0.0)
    current, anchor = finite_log_probs(log_probs.detach()), finite_log_probs(anchor_log_probs)
    difference = current.exp() - anchor.exp()
    keep = torch.where(tokens.advantages > 0, difference <= clip_high, difference >= -clip_low)
    return _kept_gradient(log_probs, anchor_log_probs, tokens, keep, ratio_cap)


@register_policy_loss("dppo_kl", silent_without_advantage=True, on_ratio=("clip_low", "clip_high", "ratio_cap"))
def dppo_kl(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """Divergence PPO with the binary KL divergence.

    As `dppo_tv`, with the divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)). A token is kept while that is
    within clip_high where A > 0, or clip_low elsewhere. It is always kept on the side from which the gradient leads
    back (p <= q where A > 0, p >= q elsewhere). arXiv:2602.04879, sec. 4 (Binary-KL).

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R].
        tokens: advantages [R].
        clip_low, clip_high: largest divergence where the advantage lowers and raises the probability, nats; 0.05 is
            the authors'.
        ratio_cap: largest weight of a token.

    Returns:
        Loss per token [R], and metrics as of `dppo_tv`.

    Raises:
        SettingsError: a bound out of range.
    """
    check_range("clip_low", clip_low, 0.0)
    check_range("clip_high", clip_high, 0.0)
    current, anchor = finite_log_probs(log_probs.detach()), finite_log_probs(anchor_log_probs)
    p, q = current.exp(), anchor.exp()
    others = (1.0 - q) * torch.log((1.0 - q + _EPSILON) / (1.0 - p + _EPSILON))
    divergence = q * (anchor - current) + others
    up = tokens.advantages > 0
    keep = torch.where(up, (divergence <= clip_high) | (p <= q), (divergence <= clip_low) | (p >= q))
    return _kept_gradient(log_probs, anchor_log_probs, tokens, keep, ratio_cap)


def _kept_gradient(
    log_probs: Tensor, anchor_log_probs: Tensor, tokens: TokenBatch, keep: Tensor, ratio_cap: float
) -> tuple[Tensor, Metrics]:
    check_range("ratio_cap", ratio_cap, 1.0)
    log_ratios = log_ratio(log_probs, anchor_log_probs)
    ratios = log_ratios.detach().exp()
    weights = torch.where(keep, ratios.clamp(max=ratio_cap), 0.0)
    loss = -tokens.advantages * weights * finite_log_probs(log_probs)
    clips = {
        "actor/pg_clipfrac": (~keep).sum(),
        "actor/pg_clipfrac_lower": ((ratios > ratio_cap) & keep).sum(),
    }
    return loss, Metrics(sums=clips) | drift_metrics(log_ratios)


@register_policy_loss("probability_band", on_ratio=("band_low", "band_high", "by_sign", "penalty"))
def probability_band(
    log_probs: Tensor,
    anchor_log_probs: Tensor,
    tokens: TokenBatch,
    *,
    band_low: float = 0.2,
    band_high: float | None = 0.2,
    by_sign: bool = True,
    advantage_scale: float = 1.0,
    penalty: float = 1e-3,
) -> tuple[Tensor, Metrics]:
    """Plain surrogate within a band of probability differences, and a quadratic pull to the anchor everywhere.

    With `d = log(p / q)`: `L = -advantage_scale A exp(d) + penalty d^2`, without its first term for dropped tokens. By
    sign, a token is dropped where `p - q > band_high` and A > 0, or `p - q < -band_low` and A <= 0 (prime-rl's former
    `default` loss). Else it is dropped where either bound is passed, whatever the advantage (IPO in prime-rl, whose
    `eps` is both bounds: 0.1). The region: arXiv:2602.04879 (Binary-TV); the penalty: Kimi K2.5, arXiv:2602.02276. The
    log-ratio is kept within +-60 in the exponential. It pulls tokens of advantage 0 as well.

    Args:
        log_probs: float [R], with gradient.
        anchor_log_probs: float [R]; meant to be the behaviour policy's.
        tokens: advantages [R].
        band_low, band_high: how far the probability may fall and rise; no upper bound without `band_high`.
        by_sign: see above.
        advantage_scale: of the advantages against the penalty.
        penalty: of the squared log-ratio, for all tokens.

    Returns:
        Loss per token [R], and metrics. Dropped tokens: `actor/is_masked`. Those with A != 0 lose a gradient by it: by
        side `actor/is_masked_low` and `_high`, by sign `actor/masked_advantage_positive` and `_negative`. The terms
        `exp(d) - 1 - d` of dropped and of kept tokens: `actor/masked_mismatch_kl`, `actor/unmasked_mismatch_kl` (shares
        of the sum over all tokens). Drift from the anchor.

    Raises:
        SettingsError: a setting out of range.
    """
    check_range("band_low", band_low, 0.0)
    check_range("penalty", penalty, 0.0)
    if band_high is not None:
        check_range("band_high", band_high, 0.0)
    advantages = tokens.advantages
    wide = log_ratio(log_probs, anchor_log_probs, WIDE_LOG_RATIO)
    bounded = wide.clamp(-_FREE_LOG_RATIO, _FREE_LOG_RATIO)
    ratios = bounded.exp()
    difference = finite_log_probs(log_probs.detach()).exp() - finite_log_probs(anchor_log_probs).exp()
    low = difference < -band_low
    high = difference > band_high if band_high is not None else torch.zeros_like(low)
    up = advantages > 0
    dropped = torch.where(up, high, low) if by_sign else low | high
    loss = penalty * wide.square() - torch.where(dropped, 0.0, advantage_scale * advantages * ratios)
    with torch.no_grad():
        mismatch = ratios - 1.0 - bounded
        sums = {
            "actor/is_masked": dropped.sum(),
            "actor/is_masked_low": (dropped & low & (advantages != 0)).sum(),
            "actor/is_masked_high": (dropped & high & (advantages != 0)).sum(),
            "actor/masked_advantage_positive": (dropped & up).sum(),
            "actor/masked_advantage_negative": (dropped & (advantages < 0)).sum(),
            "actor/masked_mismatch_kl": torch.where(dropped, mismatch, 0.0).sum(),
            "actor/unmasked_mismatch_kl": torch.where(dropped, 0.0, mismatch).sum(),
        }
    return loss, Metrics(sums=sums) | drift_metrics(wide)
