"""Rejection-sampling fine-tuning: of n responses keep the best right one, and make it more likely (best of n).

RAFT (arXiv:2304.06767, algorithm 1) and rejection-sampling fine-tuning (arXiv:2308.01825): the policy writes its own
supervised data, round after round,

    L = - sum_{i chosen} sum_t log pi(y_it) / N,     N = chosen tokens.

The likelihood of a given text is a supervised objective. It asks which responses are chosen, not which version wrote
them, so nothing is weighted where an older one did. A group without a right response teaches nothing; it is dropped
with a reason, and another takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from rollmesh.learner.algorithms.interface import Algorithm, Batch
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import finite_log_probs
from rollmesh.learner.algorithms.ragged import segment_max, segment_min
from rollmesh.learner.algorithms.settings import Settings
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    Group,
    LossOutput,
    ModelOutput,
    Needs,
    Rollouts,
    TokenBatch,
    UpdatePlan,
)


@dataclass(frozen=True)
class RejectionSamplingSettings(Settings):
    """Settings of rejection sampling.

    Attributes:
        threshold: smallest reward of a right response.
        aggregation: how token losses become the batch's loss.
    """

    threshold: float = 1.0
    aggregation: str = "token_mean"


def choose_best(rollouts: Rollouts) -> Tensor:
    """The response of every group with the highest reward, the first among equals; bool [S]."""
    best = segment_max(rollouts.rewards, rollouts.group_ids, rollouts.num_groups)
    among = rollouts.rewards == best[rollouts.group_ids]
    place = torch.arange(rollouts.num_sequences, device=rollouts.rewards.device)
    after = torch.where(among, place, rollouts.num_sequences).double()
    return place == segment_min(after, rollouts.group_ids, rollouts.num_groups)[rollouts.group_ids]


class RejectionSampling(Algorithm):
    """Maximum likelihood of the best right response of every group."""

    settings_type: ClassVar[type[Settings]] = RejectionSamplingSettings
    settings: RejectionSamplingSettings

    def __init__(self, settings: RejectionSamplingSettings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)
        self._aggregation = read_aggregation(settings.aggregation)

    @property
    def needs(self) -> Needs:
        return Needs(group_size=2)

    def group_stage(self, group: Group) -> str | None:
        right = group.scored & (group.rewards >= self.settings.threshold)
        return None if bool(right.any()) else "no_right_response"

    def batch_stage(self, batch: Batch) -> None:
        rollouts = batch.rollouts
        chosen = choose_best(rollouts)
        # Tokens that are not kept leave the loss and the counts that divide it.
        rollouts.keep = rollouts.per_token(chosen)
        rollouts.advantages = rollouts.keep.to(rollouts.rewards.dtype)
        batch.report({"rejection_sampling/chosen": float(chosen.sum())})

    def loss(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        log_probs, entropy = output.policy()
        log_probs = finite_log_probs(log_probs)
        loss = aggregate(-log_probs, tokens, counts, self._aggregation)
        likelihood, spread = log_probs.detach().sum(), entropy.detach().sum()
        return LossOutput(
            loss, Metrics(sums={"rejection_sampling/log_likelihood": likelihood, "actor/entropy": spread})
        )
