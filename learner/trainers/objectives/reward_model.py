"""Reward models: a score at the end token, by which the chosen response of a pair is better than the rejected one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from rollmesh.learner.algorithms.losses.preference import bradley_terry, pair_margins
from rollmesh.learner.algorithms.metrics import Metrics, average_of
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.data.preference_rows import ScoredPairForm
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import ModelType
from rollmesh.learner.engines.tensors.hf_folder import write_weights
from rollmesh.learner.trainers.objectives.interface import Objective
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.configs import RewardModelConfig

_MARGIN = "margin"


class RewardModelObjective(Objective):
    """`rollmesh rm`.

    Args:
        chat: encodes conversations.
        config: of the run.
    """

    model_type: ClassVar[ModelType] = "value_model"

    def __init__(self, chat: ChatEncoder, config: RewardModelConfig) -> None:
        super().__init__(chat)
        self._config = config

    def form(self, source: DataSource) -> ExampleForm:
        data = self._config.data
        return ScoredPairForm(self.chat_for(source), data, source.prompt_key or data.prompt_key)

    @property
    def loss(self) -> StepLoss:
        return StepLoss(self._share, per_sequence=0.5)

    def export(self, engine: Engine, folder: Path) -> None:
        write_weights(engine, self._config.model, folder, backbone_only=True, classifier=True)

    def _share(self, output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        scores = output.values
        if scores is None:
            raise TypeError("a language model has no scores")
        margins = tokens.sequence_extra[_MARGIN][0::2]
        # One result for each sequence, in their order.
        losses = bradley_terry(scores, margins, centering=self._config.loss.centering)
        return LossOutput(losses.sum() / max(counts.sequences / 2, 1), Metrics(averages=_averages(scores.detach())))


def _averages(scores: Tensor) -> dict[str, Tensor]:
    better = pair_margins(scores)
    return {
        "rewards/chosen": average_of(scores[0::2]),
        "rewards/rejected": average_of(scores[1::2]),
        "rewards/margins": average_of(better),
        "rewards/accuracies": average_of((better > 0).float()),
    }
