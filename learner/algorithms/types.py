"""The data that algorithms see: complete groups, a whole batch, the trained tokens of a micro-batch.

Layout. Nothing is padded: tokens of all sequences stand side by side. R = trained tokens (response tokens with mask 1,
sequence after sequence), S = sequences, G = groups, n = members of a group. A tensor [R] has one value per trained
token, `sequence_ids` names the sequence of each, `group_ids` [S] the group of each sequence. Tokens that are not
trained (prompts, tool output) do not appear, so no formula needs a mask. Log-probs are natural logarithms of the
sampled tokens. Functions compute in the dtype they are given (float32 in a run, float64 in tests).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollmesh.learner.algorithms.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Group:
    """All members of one prompt, in the order of their member index: the input of filters.

    Attributes:
        rewards: float32 [n]; meaningful where `scored`.
        scored: bool [n]; False for unscorable and failed members: they enter no statistic and are not trained.
        lengths: int64 [n], response tokens per member.
        truncated: bool [n], True where the token budget ended the response.
        components: reward components by name, each float32 [n].
        baseline_reward: reward of the group's greedy response; None without one.
    """

    rewards: Tensor
    scored: Tensor
    lengths: Tensor
    truncated: Tensor
    components: Mapping[str, Tensor] = field(default_factory=dict)
    baseline_reward: float | None = None


@dataclass(slots=True)
class Rollouts:
    """A whole batch over all micro-batches and ranks; only scored members are in it.

    An algorithm's batch stage fills the optional fields; advantage estimators read them.

    Attributes:
        group_ids: int64 [S], 0 .. G-1; members of a group need not be neighbours.
        rewards: float [S], of the whole response.
        lengths: int64 [S], trained tokens per sequence (0 is allowed); they sum to R.
        behaviour_log_probs: float [R], under the policy that sampled the tokens.
        staleness: int32 [R], versions between the token's sampling and this training.
        truncated: bool [S], True where the token budget ended the response.
        data_sources: names of the prompts' data sources, [S]; empty where they are not known.
        components: reward components by name, each float [S].
        baseline_rewards: float [S], reward of the greedy response of the sequence's group.
        probabilities: float [S], with which the buffer drew the sequence's group among those ready, where its order
            draws by priorities; None: it does not draw.
        token_rewards: float [R], added to the response's reward, which stands at the last token (KL penalty,
            process rewards).
        proximal_log_probs: float [R], under the policy that anchors the clip.
        reference_log_probs: float [R], under the KL anchor.
        values: float [R], the critic's estimate before each token.
        sum_pi_squared: float [R], sum over the vocabulary of the squared probabilities at each token.
        importance_weights: float [R], proximal / behaviour, after truncation.
        keep: bool [R], False for tokens that a correction rejects: they are not trained and not counted.
        advantages: float [R]; `per_token` makes them of one value per sequence.
        returns: float [R], targets of the critic.
        repeats: int64 [S], how often a sequence is trained (resampling); None: once.
        extra: further values per trained token [R] that the loss reads by name.
    """

    group_ids: Tensor
    rewards: Tensor
    lengths: Tensor
    behaviour_log_probs: Tensor
    staleness: Tensor
    truncated: Tensor
    data_sources: Sequence[str] = ()
    components: dict[str, Tensor] = field(default_factory=dict)
    baseline_rewards: Tensor | None = None
    probabilities: Tensor | None = None
    token_rewards: Tensor | None = None
    proximal_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None
    keep: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    repeats: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.lengths.numel()

    @property
    def num_groups(self) -> int:
        """G."""
        return int(self.group_ids.max()) + 1 if self.group_ids.numel() else 0

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.behaviour_log_probs.numel()

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [R], the sequence (0 .. S-1) of every token, non-decreasing."""
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=self.lengths.device), self.lengths, output_size=self.num_tokens
        )

    def per_token(self, values: Tensor) -> Tensor:
        """Values per sequence [S] at each token of theirs, [R]."""
        return values[self.sequence_ids]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of an estimator with different advantages for the tokens of a sequence.

    Attributes:
        advantages: float [R].
        returns: float [R], targets of the critic; None without one.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The output of a role's model for the trained tokens; its fields depend on the role and the request.

    Attributes:
        log_probs: float32 [R], of the tokens (language models).
        entropy: float32 [R], of the distribution at each token, nats (language models).
        sum_pi_squared: float32 [R], see `Rollouts`; on request.
        values: float32 [R] (value models).
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None

    def policy(self) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of a language model.

        Raises:
            TypeError: it is a value model's output.
        """
        if self.log_probs is None or self.entropy is None:
            raise TypeError("a value model has no log-probs")
        return self.log_probs, self.entropy


@dataclass(slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch: a loss's input in addition to the model's output.

    Attributes:
        sequence_ids: int64 [R], the sequence (0 .. S-1) of every token, non-decreasing.
        sequence_lengths: int64 [S], trained tokens per sequence (0 is allowed).
        behaviour_log_probs: float [R], under the policy that sampled the tokens.
        advantages: float [R].
        staleness: int32 [R], versions between the token's sampling and this training.
        sequence_rewards: float [S], as the batch stage left them.
        proximal_log_probs: float [R], under the policy that anchors the clip; None where it is the current one.
        reference_log_probs: float [R], under the KL anchor; None without one.
        importance_weights: float [R], computed by the batch stage; None where it did not.
        old_values: float [R], the critic's estimates before this batch; None without a critic.
        returns: float [R], targets of the critic; None without one.
        selected: float or bool [R], the loss's selection for this optimizer step; None without one.
        extra: further values per trained token [R] from `Rollouts.extra`.
        sequence_extra: further values per sequence [S], of trainers on pairs and single responses.
    """

    sequence_ids: Tensor
    sequence_lengths: Tensor
    behaviour_log_probs: Tensor
    advantages: Tensor
    staleness: Tensor
    sequence_rewards: Tensor
    proximal_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    importance_weights: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    selected: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    sequence_extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.sequence_ids.numel()

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.sequence_lengths.numel()


@dataclass(frozen=True, slots=True)
class StepView:
    """The whole minibatch of one optimizer step, over all micro-batches and ranks, under the current policy.

    A selection (tokens with the largest covariance, an entropy quantile) needs all of it at once.

    Attributes:
        log_probs, entropy: float [R], current policy.
        anchor_log_probs: float [R], of the policy that anchors the ratio.
        advantages: float [R].
        generator: the random numbers of this step, on the CPU, the same on every rank.
    """

    log_probs: Tensor
    entropy: Tensor
    anchor_log_probs: Tensor
    advantages: Tensor
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Sizes of the whole optimizer batch, over all micro-batches and ranks: the denominators of losses.

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
    """The run's plan for each batch; known at start.

    Attributes:
        minibatches: optimizer steps into which a batch is divided.
        epochs: passes over a batch.
        max_staleness: bound on the age of trained tokens, in versions.
        max_response_tokens: longest response in tokens.
        group_size: members per group (n), the greedy one not counted.
        steps: batches that the run will train.
        seed: of the run.
    """

    minibatches: int = 1
    epochs: int = 1
    max_staleness: int = 0
    max_response_tokens: int = 1
    group_size: int = 8
    steps: int = 1
    seed: int = 0

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro-batch's share of the loss.

    Attributes:
        loss: 0-d, already divided by the global counts: shares are summed over micro-batches and ranks.
        metrics: sums over the micro-batch's tokens, detached.
    """

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A model that an algorithm needs in addition to the actor.

    Attributes:
        name: `critic`, `reference`, `teacher` ...; its model is `learner.roles.<name>` of the configuration, by
            default the actor's initial weights.
        kind: a language model, or a value model (a scalar head in place of the vocabulary).
        trained: it has an optimizer and is in the checkpoints; else it stays as loaded.
    """

    name: str
    kind: str = "language_model"
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of an algorithm that the learner, the buffer and the generators must meet.

    Attributes:
        roles: models in addition to the actor.
        group_size: smallest number of members per group.
        greedy_baseline: every group gets one more response, decoded greedily.
        components: names of reward components; empty: none by name.
        entropy_gradient: the loss differentiates the entropy.
        selection: `Algorithm.select` is called before every optimizer step.
    """

    roles: Sequence[ModelRole] = ()
    group_size: int = 1
    greedy_baseline: bool = False
    components: Sequence[str] = ()
    entropy_gradient: bool = False
    selection: bool = False
