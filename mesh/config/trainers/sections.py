"""Sections of the trainers that differ from those of a run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section
from rollmesh.mesh.config.evaluation import CheckpointPaceSection
from rollmesh.mesh.config.inputs import Sources, SourceSampling, SourcesSection
from rollmesh.mesh.config.learner import EngineSection, OptimizerSection


class RowBatchSection(Section):
    rows: PositiveInt = Field(64, description="Rows per optimizer step, over all ranks; a pair is one row.")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="Token budget of one packed forward pass.")


class SupervisedOptimizerSection(OptimizerSection):
    lr: float = Field(1e-5, ge=0, description="Peak learning rate. 0 trains nothing.")


class TrainerSection(EngineSection):
    """The learner of a trainer: all but what belongs to rollouts."""

    steps: PositiveInt | None = Field(
        None, description="Optimizer steps; none: as many as `data.epochs` passes over the data take."
    )
    batch: RowBatchSection = Field(default_factory=RowBatchSection, description="Batch sizes.")


class SupervisedSection(TrainerSection):
    optimizer: SupervisedOptimizerSection = Field(
        default_factory=SupervisedOptimizerSection, description="Optimizer and schedule."
    )


class RowsSection(SourcesSection):
    """Rows of trainers, and their order."""

    train: Sources = Field(
        description="Rows to train on: a path, a source, or a list of these. docs/trainers.md has the rows of each "
        "command, and docs/data.md the sources."
    )
    prompt_key: str = Field("prompt", description="Field with the prompt; `a.b` is field b of field a.")
    epochs: PositiveInt | None = Field(
        None,
        description="Passes over the data; none: one, or as many as `learner.steps` take. With weights the training "
        "ends once every source has had so many.",
    )
    max_tokens: PositiveInt = Field(4096, ge=2, description="Longest sequence, prompt and response, in tokens.")
    on_long: Literal["skip", "truncate", "refuse"] = Field(
        "skip",
        description="Longer rows: leave them out and count them, cut their ends off, or end with an error.",
    )
    as_chat: bool = Field(
        False, description="Prompts and responses that are texts become a user's and an assistant's message."
    )

    @model_validator(mode="after")
    def _has_no_rewards(self) -> Self:
        for key, sources in (("train", self.train), ("eval", self.eval or ())):
            for source in sources:
                if source.ground_truth_key is not None:
                    raise ValueError(
                        f"data.{key}: {source.label} has ground_truth_key, which is for rewards: leave it out"
                    )
                if source.sampling != SourceSampling():
                    raise ValueError(f"data.{key}: {source.label} has sampling, and nothing is sampled: leave it out")
        return self


class SupervisedRowsSection(RowsSection):
    train_on: Literal["all", "last"] = Field(
        "all", description="Turns of a conversation that are trained: all of the assistant's, or the last one."
    )
    response_key: str | None = Field(
        None,
        description="Field with the response of rows without `messages`, as `prompt_key`; none: `completion`, or "
        "`response`.",
    )


class HeldOutSection(Section):
    every_steps: PositiveInt | None = Field(
        None, description="Steps between evaluations on `data.eval`; none: at the end alone."
    )
    rows: PositiveInt | None = Field(None, description="Rows of `data.eval` used; none: all.")
    metric: str = Field(
        "loss",
        min_length=1,
        description="Metric by which the best checkpoint is chosen, as `metrics.jsonl` has it after `eval/`: `loss`, "
        "`rewards/accuracies`, and with several sources `loss/SOURCE`. Among equals the earliest stays.",
    )
    direction: Literal["max", "min"] | None = Field(
        None, description="The better direction of the metric; none: `min` of a loss, `max` of all others."
    )

    @property
    def better(self) -> Literal["max", "min"]:
        """The better direction of the metric."""
        return self.direction or ("min" if self.metric.partition("/")[0] == "loss" else "max")


class TrainerCheckpointSection(CheckpointPaceSection):
    best: bool = Field(
        True,
        description="Keep the checkpoint of the best evaluation (`eval.metric`), which is written as soon as there is "
        "one.",
    )
    hf: tuple[Literal["last", "best"], ...] = Field(
        ("last",),
        min_length=1,
        description="Checkpoints that a complete training leaves as Hugging Face folders, in `RUN/hf/last` and "
        "`RUN/hf/best`.",
    )


class RankSecuritySection(Section):
    allow_insecure: bool = Field(
        False,
        description="Allow ranks of several machines, or of torchrun, to talk unprotected; they are refused otherwise.",
    )


class BradleyTerrySection(Section):
    centering: float = Field(
        0.0,
        ge=0,
        description="Weight of the mean squared sum of a pair's scores, which keeps scores around zero "
        "(arXiv:2312.09244).",
    )


class PreferenceSection(Section):
    name: Literal["sigmoid", "ipo", "kto"] = Field(
        "sigmoid",
        description="`sigmoid`: DPO. `ipo`: the squared loss, which stays finite where preferences are certain. `kto`: "
        "single responses with a `label`, good or bad.",
    )
    beta: PositiveFloat = Field(0.1, description="Strength of the implied KL penalty.")
    sft_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the chosen responses' negative log-likelihood per token (RPO, arXiv:2404.19733); "
        "not with `kto`.",
    )
    desirable_weight: PositiveFloat = Field(1.0, description="`kto`: weight of good responses.")
    undesirable_weight: PositiveFloat = Field(1.0, description="`kto`: weight of bad responses.")

    @model_validator(mode="after")
    def _belongs(self) -> PreferenceSection:
        weighted = self.desirable_weight != 1.0 or self.undesirable_weight != 1.0
        if self.name != "kto" and weighted:
            raise ValueError("desirable_weight and undesirable_weight are settings of name: kto")
        if self.name == "kto" and self.sft_weight:
            raise ValueError("sft_weight needs pairs, which name: kto does not have")
        return self
