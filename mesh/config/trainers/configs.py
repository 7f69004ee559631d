"""The whole configuration of each trainer.

They share the sections of a run wherever they mean the same. So a key of a run has the same name and meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import Section
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.refused.no_secrets import refuse_secrets
from rollmesh.mesh.config.run import RunSection, TrackingSection
from rollmesh.mesh.config.trainers.sections import (
    BradleyTerrySection,
    HeldOutSection,
    PreferenceSection,
    RankSecuritySection,
    RowsSection,
    SupervisedRowsSection,
    SupervisedSection,
    TrainerCheckpointSection,
    TrainerSection,
)


class TrainerConfig(Section):
    """The sections that all trainers share."""

    run: RunSection = Field(default_factory=RunSection, description="The run's name, folder and seed.")
    model: ModelSection = Field(description="The model to train.")
    checkpoint: TrainerCheckpointSection = Field(default_factory=TrainerCheckpointSection, description="Checkpoints.")
    eval: HeldOutSection = Field(default_factory=HeldOutSection, description="Loss and metrics on held-out rows.")
    logging: TrackingSection = Field(default_factory=TrackingSection, description="Metrics and logs.")
    security: RankSecuritySection = Field(default_factory=RankSecuritySection, description="Unprotected connections.")
    data: RowsSection
    learner: TrainerSection

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.data.curriculum is not None and self.learner.steps is None:
            raise ValueError("data.curriculum has no end of its own: set learner.steps")
        if "best" in self.checkpoint.hf and not (self.checkpoint.best and self.data.eval):
            raise ValueError("checkpoint.hf: best needs data.eval and checkpoint.best")
        return self

    @model_validator(mode="after")
    def _has_no_generators(self) -> Self:
        if self.learner.router.replay:
            raise ValueError("learner.router.replay needs generators, which record experts: leave it out")
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        refuse_secrets(self.model_dump())
        return self


class SftConfig(TrainerConfig):
    """The whole configuration of `rollmesh sft`."""

    data: SupervisedRowsSection = Field(description="Conversations, prompts with responses, or texts.")
    learner: SupervisedSection = Field(default_factory=SupervisedSection, description="Training of the model.")


class RewardModelConfig(TrainerConfig):
    """The whole configuration of `rollmesh rm`."""

    data: RowsSection = Field(description="Pairs of a chosen and a rejected response.")
    learner: SupervisedSection = Field(default_factory=SupervisedSection, description="Training of the model.")
    loss: BradleyTerrySection = Field(default_factory=BradleyTerrySection, description="The Bradley-Terry loss.")


class DpoConfig(TrainerConfig):
    """The whole configuration of `rollmesh dpo`."""

    data: RowsSection = Field(description="Pairs of a chosen and a rejected response; with `kto` single responses.")
    learner: TrainerSection = Field(default_factory=TrainerSection, description="Training of the model.")
    loss: PreferenceSection = Field(default_factory=PreferenceSection, description="The loss, and its settings.")


CONFIGS: Mapping[str, type[TrainerConfig]] = MappingProxyType(
    {"sft": SftConfig, "rm": RewardModelConfig, "dpo": DpoConfig}
)
"""The configuration of each command."""
