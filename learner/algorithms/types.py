"""What an algorithm sees of the data: a complete group, the trained tokens of a micro-batch, and global counts.

Conventions: R = trained tokens of a micro-batch (response tokens whose mask is 1, sequence after sequence),
S = its sequences, n = members of a group. Log-probs are natural logarithms of the sampled tokens in float32. Tokens
that are not trained (prompts, tool output) do not appear, so no formula needs a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithms.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Group:
    """All members of one prompt, in the order of their member index.

    Attributes:
        rewards: float32 [n]; meaningful where `scored`.
        scored: bool [n]; False for unscorable and failed members: they enter no baseline and are not trained.
        lengths: int64 [n], trained tokens per member.
        components: reward components by name, each float32 [n].
    """

    rewards: Tensor
    scored: Tensor
    lengths: Tensor
    components: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch.

    Attributes:
        sequence_ids: int64 [R], the sequence (0 .. S-1) of every token, non-decreasing.
        sequence_lengths: int64 [S], trained tokens per sequence (0 is allowed).
        behaviour_log_probs: float32 [R], under the policy that sampled the tokens.
        advantages: float32 [R].
        staleness: int32 [R], versions between the token's sampling and this training.
        proximal_log_probs: float32 [R], under the policy that anchors the clip; None where it is the current one.
        reference_log_probs: float32 [R], under the KL anchor; None without one.
    """

    sequence_ids: Tensor
    sequence_lengths: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    staleness: Tensor
    proximal_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None

    @classmethod
    def one_token(cls) -> TokenBatch:
        """The smallest batch, to try a loss out before the run."""
        return cls(
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            sequence_lengths=torch.ones(1, dtype=torch.int64),
            behaviour_log_probs=torch.full((1,), -1.0),
            advantages=torch.ones(1),
            staleness=torch.zeros(1, dtype=torch.int32),
        )

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.sequence_ids.numel()

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.sequence_lengths.numel()


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Sizes of the whole optimizer batch, over all micro-batches and ranks: what losses are normalized by.

    Attributes:
        tokens: trained tokens.
        sequences: sequences with at least one trained token.
    """

    tokens: int
    sequences: int

    def __add__(self, other: GlobalCounts) -> GlobalCounts:
        return GlobalCounts(self.tokens + other.tokens, self.sequences + other.sequences)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What the run will do with each batch; known at start.

    Attributes:
        minibatches: optimizer steps into which a batch is divided.
        epochs: passes over a batch.
        max_staleness: bound on the age of trained tokens, in versions.
        max_response_tokens: longest response in tokens.
    """

    minibatches: int = 1
    epochs: int = 1
    max_staleness: int = 0
    max_response_tokens: int = 1

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro-batch's share of the loss.

    Attributes:
        loss: float32 0-d, already divided by the global counts: shares are summed over micro-batches and ranks.
        metrics: sums over the micro-batch's tokens, detached.
    """

    loss: Tensor
    metrics: Metrics


MemberAdvantages = Sequence[Tensor]
"""One float32 tensor per member: 0-d (for all its tokens) or [T] (one per trained token)."""
