"""PRIME's estimator: returns of implicit process rewards plus the outcome's advantage."""

from __future__ import annotations

from rollmesh.learner.algorithms.advantages.normalization import centre
from rollmesh.learner.algorithms.advantages.returns import sequence_scores
from rollmesh.learner.algorithms.advantages.whitening import whiten as whitened
from rollmesh.learner.algorithms.prime import others_mean, process_rewards
from rollmesh.learner.algorithms.ragged import discounted_returns, expand, sequence_mean
from rollmesh.learner.algorithms.registry import register_advantage
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Estimate, Rollouts


@register_advantage("prime", needs=("reference_log_probs",), group_size=2)
def prime(
    rollouts: Rollouts,
    *,
    beta: float = 0.05,
    gamma: float = 1.0,
    process_weight: float = 1.0,
    outcome_weight: float = 1.0,
    whiten: bool = False,
) -> Estimate:
    """Returns of centred process rewards plus RLOO on the outcome (arXiv:2502.01456, eq. 5).

    `A_it = sum_{s >= t} gamma^(s-t) (r_phi(y_is) - mean_{j != i} r_phi(y_j)) + r_o(y_i) - mean_{j != i} r_o(y_j)`,
    where `r_phi(y_j)` is the mean process reward over the tokens of response j: the baselines leave one out, too.

    Args:
        rollouts: the whole batch; `extra["prm_log_probs"]` [R] are the implicit reward model's log-probs.
        beta: scale of the process rewards; the paper's 0.05.
        gamma: discount per token of the process rewards; the paper's 1.
        process_weight: of the first sum.
        outcome_weight: of the outcome's part.
        whiten: over the tokens that are kept; the paper names none.

    Returns:
        advantages [R]. In a group of one (or where the others are empty) the outcome's part and the baseline are 0.

    Raises:
        SettingsError: there is no implicit reward model.
    """
    assert rollouts.reference_log_probs is not None
    if "prm_log_probs" not in rollouts.extra:
        raise SettingsError(
            "advantage", "'prime' needs the log-probs of an implicit reward model", hint="use algorithm: prime"
        )
    lengths, total = rollouts.lengths, rollouts.num_tokens
    rewards = process_rewards(rollouts.extra["prm_log_probs"], rollouts.reference_log_probs, beta)
    baselines = others_mean(sequence_mean(rewards, lengths), lengths > 0, rollouts.group_ids, rollouts.num_groups)
    process = discounted_returns(rewards - expand(baselines, lengths, total), gamma, lengths)
    outcome = centre(sequence_scores(rollouts), rollouts.group_ids, rollouts.num_groups, leave_one_out=True)
    spread = expand(outcome.to(process.dtype), lengths, total)
    advantages = process_weight * process + outcome_weight * spread
    return Estimate(whitened(advantages, keep=rollouts.keep) if whiten else advantages)
