"""The configuration of the `judge` scorer: a language model at an OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section, http_parts

NAME = "judge"
"""The scorer, in `reward.functions` and `reward.by_data_source`."""
NEEDS = "the scorer `judge` needs reward.judge.base_url and reward.judge.model"
"""The reason to refuse a configuration that names the judge, and does not say where it is."""


class JudgeSection(Section):
    base_url: str | None = Field(
        None, description="The endpoint, `https://HOST/v1`; `/chat/completions` is added. See docs/judge.md."
    )
    model: str | None = Field(None, description="Name of the model, as the endpoint knows it.")
    api_key_file: Path | None = Field(
        None,
        description="A file with the key of the endpoint, closed to other users, on each host that scores. Without TLS "
        "it is sent to this host alone.",
    )
    ca_file: Path | None = Field(
        None, description="Authority of the endpoint's certificate, PEM; none: those that the host trusts."
    )
    template: Path | None = Field(
        None, description="A YAML file with the texts `system` and `user`; none: the one of the package for `mode`."
    )
    mode: Literal["score", "pairs"] = Field(
        "score",
        description="`score`: each response gets a number. `pairs`: the responses of a group are compared by twos, "
        "each pair in both orders, and the reward is the share of comparisons won.",
    )
    scale: tuple[float, float] = Field(
        (0.0, 10.0), description="The least and the largest score that the judge may give; rewards are 0 and 1 there."
    )
    opponents: PositiveInt | None = Field(
        None,
        description="In `pairs`: the others with which each response is compared, an even number. None: all others.",
    )
    votes: PositiveInt = Field(1, description="Answers to each question, which are reduced to one.")
    combine: Literal["mean", "median"] = Field("mean", description="The reduction of votes.")
    structured: Literal["json_schema", "json_object", "none"] = Field(
        "json_schema",
        description="The form of answers that is asked of the endpoint; `none`: only the template asks for it.",
    )
    temperature: float | None = Field(None, ge=0, description="None: that of the endpoint. Votes need one above 0.")
    max_tokens: PositiveInt = Field(512, description="Longest answer, thoughts included.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of each request (`reasoning_effort: low`), as they are."
    )
    timeout_s: PositiveFloat = Field(
        5.0, description="Seconds that one request may take; less than nine tenths of `reward.scorer_timeout_s`."
    )
    concurrency: PositiveInt = Field(
        64, description="Requests in progress at a time, of all that score for the run; each process may have one."
    )
    requests_per_minute: PositiveFloat | None = Field(
        None, description="Most requests, of all processes that score for the run; None: no limit."
    )
    tokens_per_minute: PositiveFloat | None = Field(
        None, description="Most tokens of prompts and answers, of all that score for the run; None: no limit."
    )
    hedged_share: float = Field(
        0.05,
        ge=0,
        le=0.05,
        description="Share of requests that may be sent twice because they take longer than 95 % of the others; the "
        "first answer counts. 0: none.",
    )
    budget_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that a run may use in all, however often it continues; then items end so.",
    )
    budget_cost: PositiveFloat | None = Field(
        None, description="The same for their cost, in the currency of the prices."
    )
    prompt_price: float = Field(0.0, ge=0, description="Price of a million tokens of prompts.")
    answer_price: float = Field(0.0, ge=0, description="Price of a million tokens of answers.")
    evidence_file: Path | None = Field(
        None, description="Each verdict with its reason is appended to this file, as a line of JSON. None: no file."
    )

    @field_validator("base_url")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = http_parts(value)
        if parts is None or parts.query or parts.fragment or parts.username is not None:
            raise ValueError("needs https://HOST/v1 or http://HOST:PORT/v1, without login and options")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _is_consistent(self) -> JudgeSection:
        low, high = self.scale
        if not low < high:
            raise ValueError(f"scale: the least score has to be below the largest one, got {low:g} and {high:g}")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("votes at temperature 0 are equal: set votes to 1, or a temperature above 0")
        if self.budget_cost is not None and not self.prompt_price + self.answer_price:
            raise ValueError("budget_cost needs prompt_price and answer_price")
        return self
