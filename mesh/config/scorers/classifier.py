"""The configuration of the `classifier` scorer: a sequence-classification model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rollmesh.mesh.config.base import ModelPath, PositiveInt, Section, http_parts

NAME = "classifier"
"""The scorer, in `reward.functions` and `reward.by_data_source`."""
FOLDER_PREFIX = "model:"
"""Before the folder of a reward model, in the same places."""


class ModelSection(Section):
    """Options of all models that judge."""

    model: ModelPath | None = Field(
        None, description="Folder of the model and its tokenizer. See docs/reward-models.md."
    )
    engine: Literal["transformers", "vllm", "sglang"] = Field(
        "transformers", description="The engine. The service starts it, unless `url` names a server of vLLM or SGLang."
    )
    url: str | None = Field(
        None, description="`http://HOST:PORT` of a server of vLLM or SGLang that has the model; none: one is started."
    )
    api_key_file: Path | None = Field(
        None, description="A file with the key of the server at `url`, closed to other users."
    )
    python: Path | None = Field(
        None,
        description="Interpreter of the environment in which vLLM or SGLang is installed; none: that of the service.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of a server that is started, by its own names."
    )
    device: str | None = Field(None, description="Its device (`cuda:1`); none: CUDA if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of the weights; `auto`: as they are stored."
    )
    max_tokens_per_batch: PositiveInt = Field(16384, description="Most tokens of one batch, padding included.")
    max_wait_ms: float = Field(
        5.0, ge=0, le=1000, description="Milliseconds for which a batch that is not full waits for others."
    )

    @field_validator("url")
    @classmethod
    def _is_server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = http_parts(value)
        if parts is None or parts.query or parts.fragment or parts.username is not None:
            raise ValueError("needs http://HOST:PORT, without login and options")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _has_its_server(self) -> ModelSection:
        if self.engine == "transformers" and (self.url or self.python or self.options):
            raise ValueError("url, python and options are for the engines vllm and sglang")
        if self.url is not None and (self.python or self.options):
            raise ValueError("python and options are for a server that is started here, and url names a running one")
        if self.url is None and self.api_key_file is not None:
            raise ValueError("api_key_file is for a server at `url`; one that is started here has a key of its own")
        return self


class ClassifierSection(ModelSection):
    template: Literal["chat", "text"] | None = Field(
        None,
        description="`chat`: the chat template of the model's tokenizer; `text`: prompt and response as they are. "
        "None: `chat` where the tokenizer has one. `model:FOLDER` always reads `text`, as `rollmesh rm` trains.",
    )
    label: str | None = Field(None, description="Name or index of the label that is the reward; none: the only one.")
    activation: Literal["none", "sigmoid", "softmax"] = Field(
        "none", description="From the label's logit to the reward."
    )
