"""The configuration of what a run starts from: the model to train, and the prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from rollmesh.mesh.config.base import ModelPath, PositiveFloat, PositiveInt, Section, Temperature


class ModelSection(Section):
    path: ModelPath = Field(description="Local Hugging Face folder, or a hub id (`org/name`).")
    revision: str | None = Field(None, description="Commit or tag of the hub id; pin it for reproducible runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Data type in which generators compute and in which weights travel. On GPUs set bfloat16: float32 "
        "takes twice the memory and is slower.",
    )


class SourceSampling(Section):
    """Sampling of one source's responses; what is left out is as for all sources."""

    temperature: Temperature | None = Field(None, description="As `rollout.temperature`, or `eval.temperature`.")
    top_p: float | None = Field(None, gt=0, le=1, description="As `eval.top_p`; for held-out sources alone.")
    top_k: int | None = Field(None, ge=0, description="As `eval.top_k`; for held-out sources alone.")
    max_response_tokens: PositiveInt | None = Field(
        None, description="As `rollout.max_response_tokens`, which bounds it."
    )
    n: PositiveInt | None = Field(None, description="As `rollout.n`; for training sources alone.")


class DataSource(Section):
    """Rows from one place, and how they are read."""

    path: ModelPath = Field(
        description="Parquet or JSONL file, a folder or a pattern (`shards/*.parquet`) of such files, a folder of "
        "`datasets.save_to_disk`, or a hub id (`org/name`)."
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="Name in messages and for the curriculum, and the `data_source` of rows that have none.",
    )
    weight: PositiveFloat | None = Field(
        None,
        le=1e12,
        description="Share of the prompts, relative to the other sources. All sources have one, or none: then every "
        "row comes once per epoch.",
    )
    rows: PositiveInt | None = Field(None, description="Use the first rows alone; none: all.")
    prompt_key: str | None = Field(None, description="As `data.prompt_key`, for this source.")
    ground_truth_key: str | None = Field(
        None,
        description="Field with the ground truth of rows without `reward_model`; none: the first of `ground_truth`, "
        "`answer` and `solution` that is there.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="In addition to `data.chat_template_kwargs`, for this source."
    )
    sampling: SourceSampling = Field(
        default_factory=SourceSampling, description="How responses to this source's prompts are sampled."
    )
    split: str | None = Field(None, description="Split of a hub id or of a saved `DatasetDict`; none: `train`.")
    subset: str | None = Field(None, description="Configuration of a hub id, as `main` of `openai/gsm8k`.")
    revision: str | None = Field(None, description="Commit or tag of the hub id; pin it for reproducible runs.")

    @model_validator(mode="before")
    @classmethod
    def _names_itself(cls, values: Any) -> Any:
        """Has errors about sampling name the source, which has a number alone in the configuration."""
        sampling = values.get("sampling") if isinstance(values, Mapping) else None
        if isinstance(sampling, Mapping):
            try:
                SourceSampling.model_validate(sampling)
            except ValidationError as error:
                what = "; ".join(f"sampling.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                known = ", ".join(SourceSampling.model_fields)
                raise ValueError(
                    f"the source {values.get('name') or values.get('path')}: {what}; sampling has {known}"
                ) from error
        return values

    @property
    def label(self) -> str:
        """Its name; without one, its path."""
        return self.name or self.path


def _as_list(value: Any) -> Any:
    """A path alone, and a source alone, are lists of one source."""
    items = [value] if isinstance(value, str | Path | Mapping | DataSource) else value
    if not isinstance(items, Iterable):
        return items
    return tuple({"path": str(item)} if isinstance(item, str | Path) else item for item in items)


def _in_short(sources: tuple[DataSource, ...] | None) -> Any:
    """As a user would write them: a path where nothing else is said."""
    if sources is None:
        return None
    items = [source.model_dump(mode="json", exclude_defaults=True) for source in sources]
    return items[0]["path"] if len(items) == 1 and items[0].keys() == {"path"} else items


Sources = Annotated[
    tuple[DataSource, ...],
    BeforeValidator(_as_list, json_schema_input_type=str | DataSource | list[str | DataSource]),
    PlainSerializer(_in_short),
    Field(min_length=1),
]


class SourcesSection(Section):
    """Rows to train on and held-out rows, and their order."""

    train: Sources = Field(description="Rows to train on: a path, a source, or a list of these. See data.md.")
    eval: Sources | None = Field(None, description="Held-out rows, in the same forms.")
    shuffle: bool = Field(True, description="Shuffle the rows of each epoch by `run.seed`.")
    epochs: PositiveInt | None = Field(
        None,
        description="Passes over the data; none: until `learner.steps` are done. With weights the run ends once every "
        "source has had so many.",
    )
    curriculum: str | None = Field(
        None,
        description="`file.py:function` that gives the weights of the sources for each step's rows, in place of "
        "`weight`. See data.md.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra arguments of the tokenizer's `apply_chat_template`."
    )

    @property
    def held_out(self) -> str:
        """The held-out sources in words."""
        return ", ".join(source.label for source in self.eval or ())

    @model_validator(mode="after")
    def _sources_fit_together(self) -> Self:
        for key, sources in (("train", self.train), ("eval", self.eval or ())):
            labels = [source.label for source in sources]
            if twice := sorted({label for label in labels if labels.count(label) > 1}):
                raise ValueError(f"data.{key}: {twice[0]} is there twice; give each source a name of its own")
        weighted = sum(source.weight is not None for source in self.train)
        if weighted not in (0, len(self.train)):
            raise ValueError("data.train: give every source a weight, or none of them")
        if any(source.weight is not None for source in self.eval or ()):
            raise ValueError("data.eval: weights are for training alone; every held-out row is used once")
        if self.curriculum is not None and weighted:
            raise ValueError("data.curriculum gives the weights; leave data.train's out")
        if self.curriculum is not None and len(self.train) == 1:
            raise ValueError("data.curriculum needs several sources in data.train")
        if self.curriculum is not None and self.epochs is not None:
            raise ValueError("data.curriculum has no end of its own; leave data.epochs out and set learner.steps")
        return self


class DataSection(SourcesSection):
    train: Sources = Field(
        description="Training prompts: a path, a source, or a list of these, with verl's fields (prompt, data_source, "
        "reward_model, ...) or TRL's columns. See data.md."
    )
    eval: Sources | None = Field(None, description="Held-out prompts, in the same forms.")
    prompt_key: str = Field(
        "prompt", description="Field with the prompt: a string, or a list of chat messages. Images: see vision.md."
    )
    on_long_prompt: Literal["skip", "refuse"] = Field(
        "skip", description="Prompts over `rollout.max_prompt_tokens`: skip and count them, or refuse to start."
    )
