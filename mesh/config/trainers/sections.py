"""Sections of the trainers that differ from those of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section
from rollmesh.mesh.config.learner import EngineSection, OptimizerSection


class RowBatchSection(Section):
    rows: PositiveInt = Field(64, description="Rows per optimizer step, over all ranks; a pair is one row.")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="Token budget of one packed forward pass.")


class SupervisedOptimizerSection(OptimizerSection):
    lr: PositiveFloat = Field(1e-5, description="Peak learning rate.")


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


class RowsSection(Section):
    """Rows of files, and their order."""

    train: Path = Field(description="Parquet or JSONL file: docs/trainers.md has the rows of each command.")
    eval: Path | None = Field(None, description="Held-out file of the same form.")
    shuffle: bool = Field(True, description="Shuffle the rows of each epoch by `run.seed`.")
    epochs: PositiveInt | None = Field(
        None, description="Passes over the data; none: one, or as many as `learner.steps` take."
    )
    max_tokens: PositiveInt = Field(4096, ge=2, description="Longest sequence, prompt and response, in tokens.")
    on_long: Literal["skip", "truncate", "refuse"] = Field(
        "skip",
        description="Longer rows: leave them out and count them, cut their ends off, or end with an error.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the tokenizer's `apply_chat_template`."
    )


class SupervisedRowsSection(RowsSection):
    train_on: Literal["all", "last"] = Field(
        "all", description="Turns of a conversation that are trained: all of the assistant's, or the last one."
    )
    prompt_key: str = Field(
        "prompt", description="Field with the prompt of rows without `messages`; `a.b` is field b of field a."
    )
    response_key: str | None = Field(
        None, description="Field with its response, likewise; none: `completion`, or `response`."
    )
    as_chat: bool = Field(
        False, description="Prompts and responses that are texts become a user's and an assistant's message."
    )


class HeldOutSection(Section):
    every_steps: PositiveInt | None = Field(
        None, description="Steps between evaluations on `data.eval`; none: at the end alone."
    )
    rows: PositiveInt | None = Field(None, description="Rows of `data.eval` used; none: all.")


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
