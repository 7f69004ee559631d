"""KTO: single responses, good or bad, arXiv:2402.01306.

The loss compares each log-ratio with z0, an estimate of KL(pi || pi_ref). It is the mean log-ratio of mismatched pairs,
and at least 0 (eq. 7 and 8 of the paper). These pairs are made of the step's own rows. Each prompt gets the response of
the row before it, and the first one that of the last. So the same responses are rewarded and estimated with. TRL and
the paper's own code do the same by micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollmesh.learner.algorithms.losses.preference import kto, response_log_ratios
from rollmesh.learner.algorithms.metrics import Metrics, average_of
from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.examples import LABEL, Example, sequence_from
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.trainers.objectives.reference import NAME, sequence_log_probs
from rollmesh.learner.trainers.step_batch import build_batch
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.trainers.sections import PreferenceSection

MISMATCHED = "mismatched_reference"
"""Name, among the values of an example, of the reference log-prob of its prompt with the response before it."""


def mismatched(examples: Sequence[Example], longest: int) -> list[Example]:
    """Each prompt with the response of the example before it: (x1, yn), (x2, y1), ..., (xn, yn-1).

    Args:
        examples: of one step, with one sequence each.
        longest: tokens that the model takes; longer pairs lose the end of the response.
    """
    own = [example.sequences[0] for example in examples]
    return [
        Example((_answered(sequence, other, longest),))
        for sequence, other in zip(own, [*own[-1:], *own[:-1]], strict=True)
    ]


class KtoLoss(StepLoss):
    """KTO, the mean over responses.

    Args:
        section: the loss, and its settings.
        longest: see `mismatched`.
    """

    def __init__(self, section: PreferenceSection, longest: int) -> None:
        super().__init__(self._share, per_sequence=1.0)
        self._section = section
        self._longest = longest
        self._divergence = 0.0

    def begin(self, engine: Engine, examples: Sequence[Example | None], token_budget: int) -> Sequence[Example | None]:
        """Estimates z0 with the present weights; see `StepLoss`."""
        kept = [example for example in examples if example is not None]
        if kept:
            batch = build_batch(mismatched(kept, self._longest), engine, token_budget)
            reference = torch.tensor([example.values[MISMATCHED][0] for example in kept], dtype=torch.float64)
            self._divergence = max(float((sequence_log_probs(engine, batch) - reference).mean()), 0.0)
        return examples

    def _share(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        section, extra, lengths = self._section, tokens.sequence_extra, tokens.sequence_lengths
        log_probs, entropy = output.policy()
        ratios = response_log_ratios(log_probs, extra[NAME], tokens.sequence_ids, lengths)
        good = extra[LABEL] > 0
        weights = torch.where(good, section.desirable_weight, section.undesirable_weight)
        losses = weights * kto(ratios, good, self._divergence, beta=section.beta)
        rewards = section.beta * ratios.detach()
        sums = segment_sum(log_probs.detach(), tokens.sequence_ids, lengths.numel())
        metrics = Metrics(
            sums={"actor/entropy": entropy.detach().sum()},
            averages={
                "rewards/chosen": average_of(rewards[good]),
                "rewards/rejected": average_of(rewards[~good]),
                "logps/chosen": average_of(sums[good]),
                "logps/rejected": average_of(sums[~good]),
                "actor/kto_divergence": average_of(rewards.new_full((1,), self._divergence)),
            },
        )
        return LossOutput(losses.sum() / max(counts.sequences, 1), metrics)


def _answered(sequence: TrainSequence, other: TrainSequence, longest: int) -> TrainSequence:
    """A sequence's prompt with another one's response."""
    room = max(1, longest - len(sequence.prompt_ids))
    return sequence_from(
        np.asarray(sequence.prompt_ids), np.asarray(other.response_ids)[:room], np.asarray(other.response_mask)[:room]
    )
