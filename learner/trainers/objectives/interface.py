"""The interface of a trainer: its rows, its loss, and the folder that it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import ExampleForm
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import ModelType
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.rows import OrderedRows
from rollmesh.learner.trainers.step_loss import StepLoss
from rollmesh.mesh.config.inputs import DataSource


class PreparationInterrupted(Exception):  # noqa: N818 - an orderly end, and no error
    """The training was asked to end before its first step; what was computed until then has been kept."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """The parts of a training before its first step.

    Attributes:
        engine: with the initial weights.
        loader: of examples.
        interrupted: true once the training is asked to end; only rank 0's counts.
    """

    engine: Engine
    loader: ExampleLoader
    interrupted: Callable[[], bool] = lambda: False


class Objective(ABC):
    """One kind of training.

    Args:
        chat: encodes conversations.

    Attributes:
        model_type: of the engine.
    """

    model_type: ClassVar[ModelType] = "language_model"

    def __init__(self, chat: ChatEncoder) -> None:
        self._chat = chat

    @abstractmethod
    def form(self, source: DataSource) -> ExampleForm:
        """The form of a source's rows."""

    def chat_for(self, source: DataSource) -> ChatEncoder:
        """The encoder of a source's conversations."""
        own = {**self._chat.template_kwargs, **source.chat_template_kwargs}
        return ChatEncoder(self._chat.tokenizer, own, self._chat.places)

    @property
    @abstractmethod
    def loss(self) -> StepLoss:
        """The loss that is trained."""

    def prepare(self, parts: Preparation, rows: OrderedRows, steps: int, cache: Path) -> OrderedRows:
        """Does what the objective needs before the first step, with the initial weights; collective.

        Args:
            parts: of the training.
            rows: to prepare.
            steps: that will use them.
            cache: file in which results may be kept for a run that continues.

        Returns:
            The rows to train on.

        Raises:
            PreparationInterrupted: the training is to end.
        """
        del parts, steps, cache
        return rows

    def export(self, engine: Engine, folder: Path) -> None:
        """Writes the trained model as a Hugging Face folder; collective."""
        engine.export_hf(folder)
