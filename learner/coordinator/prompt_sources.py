"""The data of a run, opened and checked: training prompts, and the tasks of an evaluation round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.learner.data.dataset import JoinedRows, open_source, row_form
from rollmesh.learner.data.order import Order
from rollmesh.learner.data.prompts import AgentPrompts, PromptEncoder, TaskShape
from rollmesh.learner.data.records import RowSource
from rollmesh.learner.data.row_check import RowCheck
from rollmesh.learner.data.rows import Row
from rollmesh.learner.data.stream import PromptStream
from rollmesh.learner.data.training_rows import open_training_rows
from rollmesh.learner.evaluation.asked_rows import asked_rows
from rollmesh.learner.evaluation.evaluator import evaluation_tasks
from rollmesh.learner.model_files.location import embedding_rows
from rollmesh.learner.vision.families import family_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.trajectory.image_files import ImageFiles, image_folder
from rollmesh.mesh.trajectory.images import ImageProcessor
from rollmesh.mesh.trajectory.seeds import derived_seed
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, greedy: int
) -> tuple[PromptStream, list[trajectory_pb2.PromptTask] | None]:
    """The training prompts, and the tasks of an evaluation round where there is held-out data.

    Args:
        config: of the run.
        tokenizer: of the model.
        greedy: further responses per training prompt, decoded greedily.

    Raises:
        DataError: see `learner.data`.
    """
    data = config.data
    source, order = open_training_prompts(config)
    encoder = training_encoder(config, tokenizer)
    prompts = PromptStream(
        source,
        order,
        encoder,
        _shape(config, "train", greedy),
        on_refused=data.on_long_prompt,
        images=ImageFiles(image_folder(config)),
    )
    prompts.check()
    if data.eval is None:
        return prompts, None
    held_out = open_held_out(config, tokenizer)
    return prompts, evaluation_tasks(held_out.source, held_out.encoder, held_out.shape, rows=held_out.rows)


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """Prompts of an evaluation.

    Attributes:
        source: the rows of all sources.
        rows: numbers of those that are asked.
        encoder: makes tasks of them.
        shape: of the tasks.
    """

    source: RowSource[Row]
    rows: Sequence[int]
    encoder: PromptEncoder
    shape: TaskShape


def open_held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> HeldOutPrompts:
    """The held-out prompts of a configuration.

    Args:
        config: with `data.eval`.
        tokenizer: of the model.

    Raises:
        DataError: see `learner.data`.
    """
    data, evaluation = config.data, config.eval
    if data.eval is None:
        raise DataError("data.eval is not set", hint="give Parquet or JSONL files")
    parts = [open_source(each, data.prompt_key) for each in data.eval]
    return HeldOutPrompts(
        JoinedRows(parts),
        asked_rows(list(map(len, parts)), evaluation.rows),
        evaluation_encoder(config, tokenizer),
        dataclasses.replace(
            _shape(config, "eval"),
            n=evaluation.n,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
        ),
    )


def _shape(config: Config, table: str, greedy: int = 0) -> TaskShape:
    rollout = config.rollout
    return TaskShape(
        n=rollout.n,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        greedy=greedy,
        seed=derived_seed(config.run.seed, table),
    )


def training_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    """Makes the prompts of training. They have images where the model is trained with some."""
    images = _images(config)
    if images is not None and family_of(read_config(Path(config.model.path))) is None:
        images = None
    return _encoder(config, tokenizer, images)


def evaluation_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    """Makes held-out prompts. They have images wherever the model takes some."""
    return _encoder(config, tokenizer, _images(config))


def _images(config: Config) -> ImageProcessor | None:
    # SGLang is given text alone.
    return None if config.rollout.engine == "sglang" else ImageProcessor.load(Path(config.model.path))


def _encoder(config: Config, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None) -> PromptEncoder:
    return PromptEncoder(
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        template_kwargs=config.data.chat_template_kwargs,
        agent=AgentPrompts.of(config.rollout.agent),
        images=images,
        places=embedding_rows(Path(config.model.path)),
    )


def open_training_prompts(config: Config) -> tuple[RowSource[Row], Order]:
    """The rows of all training sources, which `check_training_prompts` looks at, and the order in which they are used.

    Raises:
        DataError: see `learner.data`.
    """
    data = config.data
    return open_training_rows(data, lambda source: row_form(source, data.prompt_key), seed=config.run.seed)


def check_training_prompts(config: Config) -> RowCheck:
    """Begins to look at the rows of all training sources, once they are opened."""
    data = config.data
    return RowCheck([(source, row_form(source, data.prompt_key)) for source in data.train])
