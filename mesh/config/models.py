"""The configuration model: one YAML, one documented field each, unknown keys refused.

Each section has a module of its own; rules that tie sections together stand here. Import cost matters
(`rollmesh --help`): nothing heavy is imported in any of them.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from rollmesh.mesh.config.base import Section
from rollmesh.mesh.config.buffer import BufferSection
from rollmesh.mesh.config.evaluation import CheckpointSection, EvalSection
from rollmesh.mesh.config.inputs import DataSection, ModelSection, SourceSampling
from rollmesh.mesh.config.learner import AlgorithmSection, LearnerSection
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.config.placement import PlacementSection, section_from
from rollmesh.mesh.config.refused.no_secrets import refuse_secrets
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.mesh.config.run import LoggingSection, ResourcesSection, RunSection
from rollmesh.mesh.config.telemetry import TelemetrySection
from rollmesh.mesh.config.weights import WeightsSection


class Config(Section):
    """The whole configuration of a run."""

    run: RunSection = Field(default_factory=RunSection, description="The run's name, folder and seed.")
    model: ModelSection = Field(description="The model to train.")
    data: DataSection = Field(description="Prompts.")
    algorithm: AlgorithmSection = Field(
        default_factory=AlgorithmSection,
        description="The algorithm and its settings; a name alone is enough (`algorithm: dapo`). The name "
        "decides which settings there are: see docs/algorithms.md. `rollmesh config explain FILE` "
        "prints them all with their values, and a run checks them before anything starts.",
    )
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="Generation of responses.")
    reward: RewardSection = Field(default_factory=RewardSection, description="Scoring of responses.")
    learner: LearnerSection = Field(default_factory=LearnerSection, description="Training of the model.")
    placement: PlacementSection = Field(
        default_factory=PlacementSection,
        description="Devices of generators and learner, their own or shared in turns; the mode alone is enough "
        "(`placement: collocated`). See docs/placement.md.",
    )
    buffer: BufferSection = Field(default_factory=BufferSection, description="The replay buffer.")
    weights: WeightsSection = Field(default_factory=WeightsSection, description="Transfer of weights to generators.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Checkpoints.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Evaluation on held-out prompts.")
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Metrics and logs.")
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection, description="Traces of trajectories.")
    network: NetworkSection = Field(default_factory=NetworkSection, description="Addresses and deadlines.")
    security: SecuritySection = Field(default_factory=SecuritySection, description="Tokens and TLS.")
    resources: ResourcesSection = Field(default_factory=ResourcesSection, description="Threads and restarts.")

    @model_validator(mode="before")
    @classmethod
    def _algorithm_shorthand(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("algorithm"), str):
            return {**values, "algorithm": {"name": values["algorithm"]}}
        return values

    @property
    def kept_versions(self) -> int:
        """Versions of the weights that stay fetchable."""
        if self.weights.keep_versions is not None:
            return self.weights.keep_versions
        # Generators that sleep while others are published fetch the newest alone.
        return 1 if self.placement.mode == "collocated" else 2

    @field_validator("placement", mode="before")
    @classmethod
    def _placement_shorthand(cls, value: Any) -> Any:
        return section_from(value)

    @model_validator(mode="after")
    def _turns_keep_the_bound(self) -> Config:
        batches, most = self.placement.batches_per_turn, self.buffer.max_staleness + 1
        if batches is not None and batches > most:
            raise ValueError(
                f"placement.batches_per_turn is {batches}, and buffer.max_staleness lets at most {most} batches wait: "
                f"set placement.batches_per_turn={most} or buffer.max_staleness={batches - 1}"
            )
        return self

    @model_validator(mode="after")
    def _processes_that_can_end(self) -> Config:
        rollout = self.rollout
        if self.placement.learner_takes_turns and self.placement.release == "process" and not rollout.owns_processes:
            foreign = "an engine at rollout.sglang.address" if rollout.engine != "hf" else "rollout.engine: hf"
            raise ValueError(
                f"placement.release: process ends the processes of an engine, and {foreign} has none of its own to "
                "end; leave it at auto"
            )
        return self

    @model_validator(mode="after")
    def _replays_what_is_recorded(self) -> Config:
        if not self.learner.router.replay or self.rollout.records_experts:
            return self
        if self.rollout.engine == "sglang":
            raise ValueError(
                "learner.router.replay needs the experts that generators have chosen, which are not taken from sglang: "
                "set rollout.engine to hf or vllm, or learner.router.replay to false"
            )
        raise ValueError(
            "learner.router.replay needs the experts that generators have chosen: set "
            f"rollout.{self.rollout.engine}.routed_experts to true, or leave learner.router.replay out where the model "
            "has no experts"
        )

    @model_validator(mode="after")
    def _no_secrets(self) -> Config:
        refuse_secrets(self.model_dump())
        return self

    @model_validator(mode="after")
    def _deadlines_nest(self) -> Config:
        if not self.reward.scorer_timeout_s < self.reward.timeout_s < self.rollout.reward_wait_s:
            raise ValueError(
                "deadlines must nest: reward.scorer_timeout_s < reward.timeout_s < rollout.reward_wait_s, got "
                f"{self.reward.scorer_timeout_s} / {self.reward.timeout_s} / {self.rollout.reward_wait_s}"
            )
        self._check_stall_limit()
        if self.rollout.top_p != 1.0 or self.rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k must be off in training: the learner could not recompute the "
                "distribution sampled from"
            )
        if self.buffer.min_members > self.rollout.n:
            raise ValueError(
                f"buffer.min_members ({self.buffer.min_members}) exceeds rollout.n ({self.rollout.n}): set "
                f"buffer.min_members={self.rollout.n}"
            )
        return self

    @model_validator(mode="after")
    def _sources_can_be_sampled(self) -> Config:
        for key, sources in (("train", self.data.train), ("eval", self.data.eval or ())):
            for source in sources:
                if why := self._refuses(source.sampling, training=key == "train"):
                    raise ValueError(f"data.{key}: the source {source.label}: sampling.{why}")
        return self

    def _refuses(self, sampling: SourceSampling, *, training: bool) -> str:
        """The reason why a source cannot be sampled so; empty where it can."""
        longest, least = self.rollout.max_response_tokens, self.buffer.min_members
        if sampling.max_response_tokens is not None and sampling.max_response_tokens > longest:
            return f"max_response_tokens exceeds rollout.max_response_tokens ({longest}), which is the largest of all"
        if sampling.temperature is not None and sampling.temperature > 2 and self.rollout.engine == "vllm":
            return f"temperature {sampling.temperature:g}: vLLM samples at 2 at most"
        if training and (sampling.top_p is not None or sampling.top_k is not None):
            return "top_p and top_k are for held-out sources: the learner could not recompute their distribution"
        if training and sampling.n is not None and sampling.n < least:
            return f"n is below buffer.min_members ({least})"
        if not training and sampling.n is not None:
            return "n is for training sources: metrics of an evaluation compare prompts with as many responses (eval.n)"
        return ""

    @property
    def group_sizes(self) -> tuple[int, int]:
        """Responses to a training prompt, at least and at most, over all sources."""
        sizes = [source.sampling.n or self.rollout.n for source in self.data.train]
        return min(sizes), max(sizes)

    @model_validator(mode="after")
    def _serves_adapters(self) -> Config:
        if self.learner.served_adapter is not None and self.rollout.engine not in ("vllm", "sglang"):
            raise ValueError(
                "learner.lora.push: served needs an engine that computes with adapters, and rollout.engine is "
                f"{self.rollout.engine}: set learner.lora.push=merged, or rollout.engine to vllm or sglang"
            )
        return self

    @model_validator(mode="after")
    def _agents_have_one_template(self) -> Config:
        if self.rollout.agent.kind != "none":
            for source in (*self.data.train, *(self.data.eval or ())):
                if source.chat_template_kwargs:
                    raise ValueError(
                        f"the source {source.label} has chat_template_kwargs, and an agent's turns are all written "
                        "with those of data.chat_template_kwargs: leave them out"
                    )
        return self

    @model_validator(mode="after")
    def _folders_are_read_from_checkpoints(self) -> Config:
        if self.checkpoint.hf and not self.learner.has_readable_checkpoints:
            raise ValueError(
                f"checkpoint.hf needs learner.engine: fsdp2 or megatron, got {self.learner.engine}: no other files are "
                "read"
            )
        return self

    def _check_stall_limit(self) -> None:
        """Refuses a stall limit below deadlines of silent work: such work must end before the run does."""
        agent, limit_s = self.rollout.agent, self.buffer.stall_limit_s
        inner = {"buffer.stall_s": self.buffer.stall_s, "rollout.reward_wait_s": self.rollout.reward_wait_s}
        if agent.kind != "none":
            inner["rollout.agent.episode_timeout_s"] = agent.episode_timeout_s
        for name, seconds in inner.items():
            if limit_s and limit_s <= seconds:
                raise ValueError(
                    f"deadlines must nest: {name} < buffer.stall_limit_s, got {seconds:g} / {limit_s:g} (0: no limit)"
                )
