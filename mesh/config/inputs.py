"""The configuration of what a run starts from: the model to train, and the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollmesh.mesh.config.base import ModelPath, PositiveInt, Section


class ModelSection(Section):
    path: ModelPath = Field(description="Local Hugging Face folder, or a hub id (`org/name`).")
    revision: str | None = Field(None, description="Commit or tag of the hub id; pin it for reproducible runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Data type in which generators compute and in which weights travel. On GPUs set bfloat16: float32 "
        "takes twice the memory and is slower.",
    )


class DataSection(Section):
    train: Path = Field(description="Parquet or JSONL with verl's fields (prompt, data_source, reward_model, ...).")
    eval: Path | None = Field(None, description="Held-out file of the same form.")
    prompt_key: str = Field(
        "prompt", description="Field with the prompt: a string, or a list of chat messages. Images: see vision.md."
    )
    shuffle: bool = Field(True, description="Shuffle the rows of each epoch by `run.seed`.")
    epochs: PositiveInt | None = Field(None, description="Passes over the data; none: until `learner.steps` are done.")
    on_long_prompt: Literal["skip", "refuse"] = Field(
        "skip", description="Prompts over `rollout.max_prompt_tokens`: skip and count them, or refuse to start."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the tokenizer's `apply_chat_template`."
    )
