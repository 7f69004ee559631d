"""Preference optimization: DPO and IPO on pairs, KTO on single responses with labels.

The reference policy is the model that the training starts from. With an adapter that is the model without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.learner.algorithms.losses.preference import (
    dpo_ipo,
    dpo_sigmoid,
    kto,
    pair_margins,
    response_log_ratios,
)
from rollmesh.learner.algorithms.metrics import Metrics, average_of
from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import Example, ExampleSource
from rollmesh.learner.data.preference_rows import LabeledRows, PairRows
from rollmesh.learner.data.records import RecordSource
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.objective import Objective
from rollmesh.learner.trainers.reference import NAME, sequence_log_probs, with_reference
from rollmesh.learner.trainers.step_batch import build_batch
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.trainers.configs import DpoConfig
from rollmesh.mesh.config.trainers.sections import PreferenceSection

_LABEL = "label"


class PreferenceObjective(Objective):
    """`rollmesh dpo`.

    Args:
        chat: encodes conversations.
        config: of the run.
    """

    def __init__(self, chat: ChatEncoder, config: DpoConfig) -> None:
        self._chat = chat
        self._config = config

    def source(self, records: RecordSource) -> ExampleSource:
        rows = LabeledRows if self._config.loss.name == "kto" else PairRows
        return rows(records, self._chat, self._config.data)

    @property
    def loss(self) -> StepLoss:
        section = self._config.loss
        return KtoLoss(section) if section.name == "kto" else PairLoss(section)

    def prepare(
        self, engine: Engine, loader: ExampleLoader, source: ExampleSource, rows: Sequence[int], cache: Path
    ) -> ExampleSource:
        batch = self._config.learner.batch
        return with_reference(
            engine,
            loader,
            source,
            rows,
            cache,
            batch_rows=batch.rows,
            token_budget=batch.tokens_per_micro_batch,
        )


class PairLoss(StepLoss):
    """DPO or IPO, the mean over pairs.

    Args:
        section: the loss, and its settings.
    """

    def __init__(self, section: PreferenceSection) -> None:
        super().__init__(self._share, per_sequence=0.5)
        self._section = section

    def _share(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        section, lengths = self._section, tokens.sequence_lengths
        log_probs, entropy = output.policy()
        ratios = response_log_ratios(log_probs, tokens.sequence_extra[NAME], tokens.sequence_ids, lengths)
        if section.name == "ipo":
            losses = dpo_ipo(pair_margins(ratios / lengths), beta=section.beta)
        else:
            losses = dpo_sigmoid(pair_margins(ratios), beta=section.beta)
        sums = segment_sum(log_probs, tokens.sequence_ids, lengths.numel())
        if section.sft_weight:
            losses = losses - section.sft_weight * (sums / lengths)[0::2]
        rewards = section.beta * ratios.detach()
        margins = pair_margins(rewards)
        metrics = Metrics(
            sums={"actor/entropy": entropy.detach().sum()},
            averages={
                **_by_side("rewards", rewards[0::2], rewards[1::2]),
                **_by_side("logps", sums.detach()[0::2], sums.detach()[1::2]),
                "rewards/margins": average_of(margins),
                "rewards/accuracies": average_of((margins > 0).float()),
            },
        )
        return LossOutput(losses.sum() / max(counts.sequences / 2, 1), metrics)


class KtoLoss(StepLoss):
    """KTO, the mean over responses.

    Args:
        section: the loss, and its settings.
    """

    def __init__(self, section: PreferenceSection) -> None:
        super().__init__(self._share, per_sequence=1.0)
        self._section = section
        self._divergence = 0.0

    def begin(self, engine: Engine, examples: Sequence[Example | None], token_budget: int) -> list[Example | None]:
        """Estimates how far the policy has moved, by responses to the wrong prompts; see `StepLoss`."""
        kept = [example for example in examples if example is not None]
        if kept:
            batch = build_batch([_part(example, 1) for example in kept], engine, token_budget)
            reference = torch.tensor([example.values[NAME][1] for example in kept], dtype=torch.float64)
            moved = sequence_log_probs(engine, batch) - reference
            self._divergence = max(float(moved.mean()), 0.0)
        return [None if example is None else _part(example, 0) for example in examples]

    def _share(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        section, extra, lengths = self._section, tokens.sequence_extra, tokens.sequence_lengths
        log_probs, entropy = output.policy()
        ratios = response_log_ratios(log_probs, extra[NAME], tokens.sequence_ids, lengths)
        good = extra[_LABEL] > 0
        weights = torch.where(good, section.desirable_weight, section.undesirable_weight)
        losses = weights * kto(ratios, good, self._divergence, beta=section.beta)
        rewards = section.beta * ratios.detach()
        sums = segment_sum(log_probs.detach(), tokens.sequence_ids, lengths.numel())
        metrics = Metrics(
            sums={"actor/entropy": entropy.detach().sum()},
            averages={
                **_by_side("rewards", rewards[good], rewards[~good]),
                **_by_side("logps", sums[good], sums[~good]),
                "actor/kto_divergence": average_of(rewards.new_full((1,), self._divergence)),
            },
        )
        return LossOutput(losses.sum() / max(counts.sequences, 1), metrics)


def _part(example: Example, place: int) -> Example:
    """One sequence of an example, with its values."""
    values = {name: (values[place],) for name, values in example.values.items()}
    return Example((example.sequences[place],), values)


def _by_side(name: str, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {f"{name}/chosen": average_of(chosen), f"{name}/rejected": average_of(rejected)}
