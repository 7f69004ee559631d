"""The configuration of rewards: reward functions, reward services, deadlines."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section
from rollmesh.mesh.config.scorers import classifier, process
from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.mesh.config.scorers.classifier import ClassifierSection
from rollmesh.mesh.config.scorers.code import NAMES as CODE
from rollmesh.mesh.config.scorers.code import CodeSection
from rollmesh.mesh.config.scorers.http import HttpSection
from rollmesh.mesh.config.scorers.isolation import Isolation, IsolationSection
from rollmesh.mesh.config.scorers.judge import NAME, NEEDS, JudgeSection
from rollmesh.mesh.config.scorers.late import LateSection
from rollmesh.mesh.config.scorers.parts import Entry, Interval, all_uses, check_parts, interval
from rollmesh.mesh.config.scorers.process import ProcessSection


class EndpointTls(Section):
    ca: Path | None = Field(
        None, description="Authority of the endpoint's certificate; none: `security.tls_ca`, or the public authorities."
    )
    cert: Path | None = Field(None, description="Certificate by which generators prove themselves to it.")
    key: Path | None = Field(None, description="Key of that certificate, closed to other users.")

    @model_validator(mode="after")
    def _whole(self) -> EndpointTls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together")
        return self


class RewardSection(Section):
    functions: list[Entry] = Field(
        default_factory=lambda: list[Entry](["auto"]),
        description="Scorers, summed. Registered names are auto, arithmetic, choice, environment, exact_match, gsm8k, "
        "gsm8k_strict, gsm8k_flexible, ifeval, ifeval_fraction, json_schema, json_schema_fraction, math, "
        "math_string, math_dapo, none, qa, regex, strings. Two take an option: `regex:PATTERN` and "
        "`json_schema:FILE`. `classifier`, `process` and `judge` are the models of their sections, and "
        "`model:FOLDER` is a reward model of `rollmesh rm`. `code` and `code_fraction` run programs "
        "(docs/code-rewards.md). Functions with verl's or TRL's signature are `module:function` or "
        "`file.py:function`. `auto` takes the reward of the episode if it has one, else picks by the exact name of "
        "the data_source. A part with options is `{use: NAME, weight: 0.1}`, see docs/reward-composition.md.",
    )
    by_data_source: dict[str, list[Entry]] = Field(
        default_factory=dict,
        description="data_source -> scorers as in `functions`, or endpoints, which take precedence over `functions` "
        "and `endpoints`.",
    )
    normalize: dict[str, Interval] = Field(
        default_factory=dict,
        description="data_source -> [low, high]: the totals that become rewards of 0 and 1. For runs whose sources "
        "have different scales.",
    )
    endpoints: list[str] = Field(
        default_factory=list,
        description="Reward services: `grpc://host:port`, or `host:port` for short, or `https://host/base`. Servers "
        "for OpenRLHF are `openrlhf+http://host:port/path`, those of NeMo Gym `nemo-gym+http://host:port`. None: one "
        "is started here.",
    )
    key_files: dict[str, Path] = Field(
        default_factory=dict,
        description="By endpoint, written as above: a file with the key that is sent to it as a bearer token. "
        "It has to be on each generator's host.",
    )
    tls: dict[str, EndpointTls] = Field(
        default_factory=dict,
        description="By endpoint (`grpcs://host:port`, written as above): files for its TLS, on each generator's host.",
    )
    timeout_s: PositiveFloat = Field(
        20.0,
        description="Deadline of one Score call, in seconds. Items that cannot be begun in time to get their "
        "`scorer_timeout_s` are returned and wait for their turn; this is not a failure.",
    )
    scorer_timeout_s: PositiveFloat = Field(
        8.0, description="Seconds that one scorer call may take; then its worker process is ended and replaced."
    )
    attempts: PositiveInt = Field(3, description="Tries of an item with a retryable error.")
    in_process: bool = Field(
        False,
        description="Score on the generators' side, in worker processes of theirs (small runs); no service is started.",
    )
    workers: PositiveInt | None = Field(
        None,
        description="Most processes that run scorers, started as they are needed. None: as many as there are "
        "cores (4 to 16) for functions that compute, and 32 for functions that wait for "
        "something.",
    )
    cache: CacheSection = Field(
        default_factory=CacheSection, description="Scores that are kept for equal items (docs/reward-composition.md)."
    )
    python: Path | None = Field(None, description="Interpreter of the reward service; none: that of `rollmesh`.")
    isolation: Isolation = Field(
        default_factory=IsolationSection,
        description="Where programs that a model has written are run; `auto` is the highest rung of the host.",
    )
    code: CodeSection = Field(
        default_factory=CodeSection, description="Programs of the scorers `code` and `code_fraction`."
    )
    judge: JudgeSection = Field(
        default_factory=JudgeSection, description="The language model that the scorer `judge` asks."
    )
    classifier: ClassifierSection = Field(
        default_factory=ClassifierSection, description="The model of the scorer `classifier`, and of `model:FOLDER`."
    )
    process: ProcessSection = Field(
        default_factory=ProcessSection, description="The model of the scorer `process`, which judges steps."
    )
    http: HttpSection = Field(
        default_factory=HttpSection, description="The reward service over HTTP, for callers without gRPC."
    )
    late: LateSection = Field(
        default_factory=LateSection, description="Rewards that are known only later, and delivered then."
    )

    @model_validator(mode="after")
    def _models_are_named(self) -> RewardSection:
        for name, section in ((classifier.NAME, self.classifier), (process.NAME, self.process)):
            if section.model is None and name in self.uses:
                raise ValueError(f"the scorer `{name}` needs reward.{name}.model, the folder of its model")
        return self

    @property
    def asks_judge(self) -> bool:
        """True if a source's functions name the judge."""
        return NAME in self.uses

    @property
    def runs_programs(self) -> bool:
        """True if a source's functions run programs that a model has written."""
        return any(name in self.uses for name in CODE)

    @model_validator(mode="after")
    def _programs_have_time(self) -> RewardSection:
        if self.runs_programs and self.code.time_s >= 0.9 * self.scorer_timeout_s:
            raise ValueError(
                "deadlines must nest: reward.code.time_s < 0.9 * reward.scorer_timeout_s, got "
                f"{self.code.time_s:g} / {self.scorer_timeout_s:g}"
            )
        return self

    @property
    def uses(self) -> list[str]:
        """All functions and endpoints that the section names for any source, in their order."""
        return all_uses(self.functions, self.by_data_source)

    @model_validator(mode="after")
    def _parts_fit(self) -> RewardSection:
        for key, entries in (
            ("functions", self.functions),
            *((f"by_data_source.{source}", own) for source, own in self.by_data_source.items()),
        ):
            try:
                stages = check_parts(entries)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            if stages > 1 and stages * self.scorer_timeout_s >= self.timeout_s:
                raise ValueError(
                    f"deadlines must nest: gates of {key} let {stages} functions wait for one another, so "
                    f"{stages} * reward.scorer_timeout_s < reward.timeout_s, got {stages * self.scorer_timeout_s:g} / "
                    f"{self.timeout_s:g}"
                )
        return self

    @model_validator(mode="after")
    def _is_normalized_here(self) -> RewardSection:
        for source, bounds in self.normalize.items():
            try:
                interval(bounds)
            except ValueError as error:
                raise ValueError(f"normalize.{source}: {error}") from error
            if "://" in "".join(all_uses(self.by_data_source.get(source, ()), {})):
                raise ValueError(f"normalize.{source}: a service scores this source, which has to normalize it itself")
        return self

    @model_validator(mode="after")
    def _judge_can_be_asked(self) -> RewardSection:
        if not self.asks_judge:
            return self
        if self.judge.base_url is None or self.judge.model is None:
            raise ValueError(NEEDS)
        if self.judge.timeout_s >= 0.9 * self.scorer_timeout_s:
            raise ValueError(
                "deadlines must nest: reward.judge.timeout_s < 0.9 * reward.scorer_timeout_s, got "
                f"{self.judge.timeout_s:g} / {self.scorer_timeout_s:g}"
            )
        return self
