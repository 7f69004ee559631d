"""The configuration of the `process` scorer: a model that judges each step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.scorers.classifier import ModelSection

NAME = "process"
"""The scorer, in `reward.functions` and `reward.by_data_source`."""


class ProcessSection(ModelSection):
    steps: Literal["blank_rows", "rows", "numbered", "spans"] = Field(
        "blank_rows",
        description="Where a step ends: at blank rows, at each row, before `Step N:`, or where the item's spans do "
        "(turns of an episode).",
    )
    total: Literal["min", "mean", "last", "product", "none"] = Field(
        "min", description="From the values of the steps to the reward; `none`: 0."
    )
    per_step: bool = Field(
        False,
        description="Each step's value is also a reward at its last token, in addition to the reward. Estimators that "
        "see one reward per response add them all up.",
    )
    template: Literal["chat", "text"] | None = Field(
        None, description="Of the prompt, as of the classifier. None: `chat` where the tokenizer has a chat template."
    )
    system: str = Field("", description="System message before the prompt's messages, with the chat template.")
    separator: str = Field(
        "\n\n", description="Text after each step, at whose last token the step's value is read (`<extra_0>`, ` ки`)."
    )
    good: str = Field("", description="Text of a causal model's token for good steps (`+`); else empty.")
    bad: str = Field("", description="The same for bad steps (`-`).")
    label: str | None = Field(
        None, description="Name or index of the label of good steps; none: the last one, or a classifier's only one."
    )
    activation: Literal["none", "sigmoid", "softmax"] = Field(
        "softmax", description="From a step's logits to its value."
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> ProcessSection:
        if bool(self.good) != bool(self.bad):
            raise ValueError("a causal model needs both `good` and `bad`")
        if self.engine == "sglang":
            raise ValueError("SGLang has no values of single tokens: use engine vllm or transformers")
        if self.total == "none" and not self.per_step:
            raise ValueError("total none needs per_step: there would be no reward")
        if self.total == "product" and self.activation == "none":
            raise ValueError("a product needs values from 0 to 1: set activation to sigmoid or softmax")
        return self
