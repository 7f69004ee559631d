"""Preference optimization: DPO and IPO on pairs, KTO on single responses with labels.

The reference policy is the model as it was loaded. With an adapter it is the model without it, as in a run, also where
the adapter begins with that of `learner.lora.start_from`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from rollmesh.learner.algorithms.losses.preference import (
    dpo_ipo,
    dpo_sigmoid,
    pair_margins,
    response_log_ratios,
)
from rollmesh.learner.algorithms.metrics import Metrics, average_of
from rollmesh.learner.algorithms.ragged import segment_sum
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.data.preference_rows import LabeledForm, PairForm
from rollmesh.learner.trainers.objectives.interface import Objective, Preparation
from rollmesh.learner.trainers.objectives.kto import MISMATCHED, KtoLoss, mismatched
from rollmesh.learner.trainers.objectives.reference import NAME, ReferencePolicy
from rollmesh.learner.trainers.rows import OrderedRows
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.configs import DpoConfig
from rollmesh.mesh.config.trainers.sections import PreferenceSection


class PreferenceObjective(Objective):
    """`rollmesh dpo`.

    Args:
        chat: encodes conversations.
        config: of the run.
    """

    def __init__(self, chat: ChatEncoder, config: DpoConfig) -> None:
        super().__init__(chat)
        self._config = config

    def form(self, source: DataSource) -> ExampleForm:
        chat, key = self.chat_for(source), source.prompt_key or self._config.data.prompt_key
        return (LabeledForm if self._is_kto else PairForm)(chat, self._config.data, key)

    @property
    def loss(self) -> StepLoss:
        section = self._config.loss
        return KtoLoss(section, self._config.data.max_tokens) if self._is_kto else PairLoss(section)

    def prepare(self, parts: Preparation, rows: OrderedRows, steps: int, cache: Path) -> OrderedRows:
        batch, longest = self._config.learner.batch, self._config.data.max_tokens
        has_adapter = self._config.learner.lora is not None
        reference = ReferencePolicy(parts, batch.rows, batch.tokens_per_micro_batch, has_adapter=has_adapter)
        used = rows.used(steps, batch.rows)
        source = reference.with_sums(rows.source, used, cache, sequences=1 if self._is_kto else 2)
        if not self._is_kto:
            return OrderedRows(source, rows.order)
        apart = cache.with_name(f"{cache.stem}-{MISMATCHED}{cache.suffix}")
        sums = reference.sums_by_step(rows, steps, partial(mismatched, longest=longest), apart)
        return OrderedRows(source, rows.order, {MISMATCHED: sums})

    @property
    def _is_kto(self) -> bool:
        return self._config.loss.name == "kto"


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


def _by_side(name: str, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {f"{name}/chosen": average_of(chosen), f"{name}/rejected": average_of(rejected)}
