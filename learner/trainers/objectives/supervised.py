"""Supervised fine-tuning: the negative log-likelihood of the assistant's words."""

from __future__ import annotations

from rollmesh.learner.algorithms.losses.supervised import cross_entropy
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.data.supervised_rows import SupervisedForm
from rollmesh.learner.trainers.objectives.interface import Objective
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import SupervisedRowsSection


class SupervisedObjective(Objective):
    """`rollmesh sft`.

    Args:
        chat: encodes conversations.
        section: forms of the rows.
    """

    def __init__(self, chat: ChatEncoder, section: SupervisedRowsSection) -> None:
        super().__init__(chat)
        self._section = section

    def form(self, source: DataSource) -> ExampleForm:
        return SupervisedForm(self.chat_for(source), self._section, source.prompt_key or self._section.prompt_key)

    @property
    def loss(self) -> StepLoss:
        return StepLoss(cross_entropy)
