"""The configuration of the `classifier` scorer: a sequence-classification model."""

from __future__ import annotations

from typing import Literal

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
        "transformers", description="The engine: transformers in a process of ours, or a server at `url`."
    )
    url: str | None = Field(None, description="`http://HOST:PORT` of a server of vLLM or SGLang that has the model.")
    device: str | None = Field(None, description="Device of transformers (`cuda:1`); none: CUDA if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights of transformers; `auto`: as they are stored."
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
        if (self.engine == "transformers") == (self.url is not None):
            raise ValueError("engine vllm or sglang needs a url, and transformers has none")
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
