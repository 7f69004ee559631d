"""The configuration of checkpoints, and of evaluation, which picks the best one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section, Temperature


class CheckpointPaceSection(Section):
    """When checkpoints are written, and how many stay."""

    every_steps: PositiveInt | None = Field(
        None, description="Steps between checkpoints; training waits if the previous one is still being written."
    )
    every_s: PositiveFloat | None = Field(
        600.0,
        description="Seconds between checkpoints (whichever comes first); the next is begun when the previous "
        "one is written.",
    )
    keep: PositiveInt = Field(2, description="Checkpoints kept in addition to the best one and those being evaluated.")


class CheckpointSection(CheckpointPaceSection):
    best: bool = Field(
        True,
        description="Write a checkpoint of every version that is evaluated, and keep that of the best one "
        "(`eval.metric`).",
    )
    copy_to: str | None = Field(
        None,
        description="URL below which every checkpoint that is kept is copied once it is committed, as "
        "`s3://bucket/runs`; the folder there has the run's name. The store's package for fsspec, as s3fs, has to be "
        "installed. `rollmesh fetch` brings a run back.",
        # Members of the mesh receive the configuration, logs have it: a login belongs into the environment.
        pattern=r"^[a-z0-9+.-]+:(:|//)[^@]*$",
    )
    hf: tuple[Literal["last", "best"], ...] = Field(
        (),
        description="Checkpoints that a complete run leaves as Hugging Face folders too, in `RUN/hf/last` and "
        "`RUN/hf/best`. `rollmesh export` makes one of any checkpoint at any time.",
    )


class EvalSection(Section):
    every_steps: PositiveInt | None = Field(None, description="Steps between evaluations; first and last are always.")
    rows: PositiveInt | None = Field(None, description="Rows of `data.eval` used, as many of each source; none: all.")
    n: PositiveInt = Field(1, description="Responses per held-out prompt.")
    temperature: Temperature = Field(0.0, description="Temperature of held-out responses: 0, or 0.01 and above.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass of held-out responses; 1 is off.")
    top_k: int = Field(0, ge=0, description="Number of most likely tokens kept for held-out responses; 0 is off.")
    stop_at: float | None = Field(None, description="End the run once the held-out reward reaches this.")
    metric: str = Field(
        "reward",
        pattern=r"^(reward(/.+)?|(mean|maj|best|pass)@[1-9][0-9]*)$",
        description="Metric by which the best version is chosen: `reward`, `reward/DATA_SOURCE`. With n above "
        "1 there are also `mean@N`, `maj@N`, `best@N`, and `pass@K` for K = 1, 2, 4, ... up to n. Among "
        "equals the earliest stays.",
    )
    direction: Literal["max", "min"] = Field("max", description="The better direction of the metric.")
    right_at: float = Field(1.0, description="Reward from which a response counts as correct, for `pass@K`.")
    keep_rows: int = Field(
        200, ge=0, description="Prompts of a round that are kept with their responses and rewards, in RUN/eval."
    )
    timeout_s: PositiveFloat = Field(60.0, description="Seconds an evaluation round may take before it is abandoned.")

    @model_validator(mode="after")
    def _metric_can_be(self) -> EvalSection:
        name, at, number = self.metric.partition("@")
        if at and not self.metric.startswith("reward/"):
            found = [1 << power for power in range(self.n.bit_length()) if 1 << power < self.n] + [self.n]
            if self.n == 1 or int(number) not in (found if name == "pass" else [self.n]):
                raise ValueError(f"eval.metric: {self.metric} is not measured with eval.n: {self.n}")
        return self
