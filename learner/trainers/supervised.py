"""Supervised fine-tuning: the negative log-likelihood of the assistant's words."""

from __future__ import annotations

from rollmesh.learner.algorithms.losses.supervised import cross_entropy
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import ExampleSource
from rollmesh.learner.data.records import RecordSource
from rollmesh.learner.data.supervised_rows import SupervisedRows
from rollmesh.learner.trainers.objective import Objective
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.trainers.sections import SupervisedRowsSection


class SupervisedObjective(Objective):
    """`rollmesh sft`.

    Args:
        chat: encodes conversations.
        section: forms of the rows.
    """

    def __init__(self, chat: ChatEncoder, section: SupervisedRowsSection) -> None:
        self._chat = chat
        self._section = section

    def source(self, records: RecordSource) -> ExampleSource:
        return SupervisedRows(records, self._chat, self._section)

    @property
    def loss(self) -> StepLoss:
        return StepLoss(cross_entropy)
