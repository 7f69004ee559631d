"""The interface of a trainer: its rows, its loss, and the folder that it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rollmesh.learner.data.examples import ExampleSource
from rollmesh.learner.data.records import RecordSource
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import ModelType
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.step_loss import StepLoss


class Objective(ABC):
    """One kind of training.

    Attributes:
        model_type: of the engine.
    """

    model_type: ClassVar[ModelType] = "language_model"

    @abstractmethod
    def source(self, records: RecordSource) -> ExampleSource:
        """The examples of a file."""

    @property
    @abstractmethod
    def loss(self) -> StepLoss:
        """The loss that is trained."""

    def prepare(
        self, engine: Engine, loader: ExampleLoader, source: ExampleSource, rows: Sequence[int], cache: Path
    ) -> ExampleSource:
        """Does what the objective needs before the first step, with the initial weights; collective.

        Args:
            engine: with the initial weights.
            loader: of examples.
            source: to prepare.
            rows: those that will be used.
            cache: file in which results may be kept for a run that continues.

        Returns:
            The source to train on.
        """
        del engine, loader, rows, cache
        return source

    def export(self, engine: Engine, folder: Path) -> None:
        """Writes the trained model as a Hugging Face folder; collective."""
        engine.export_hf(folder)
