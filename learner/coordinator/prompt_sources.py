"""The data of a run, opened and checked: training prompts, and the tasks of an evaluation round."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.learner.data import AgentPrompts, DataOrder, PromptEncoder, PromptStream, open_dataset
from rollmesh.learner.data.prompts import TaskShape
from rollmesh.learner.data.rows import RowSource
from rollmesh.learner.evaluation.evaluator import evaluation_tasks
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.images import ImageProcessor
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
    data, evaluation = config.data, config.eval
    source = open_dataset(data.train, data.prompt_key)
    order = DataOrder(len(source), seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)
    prompts = PromptStream(
        source, order, _encoder(config, tokenizer), _shape(config, greedy), on_refused=data.on_long_prompt
    )
    prompts.check()
    if data.eval is None:
        return prompts, None
    held_out = open_held_out(config, tokenizer)
    return prompts, evaluation_tasks(held_out.source, held_out.encoder, held_out.shape, rows=evaluation.rows)


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """Prompts of an evaluation.

    Attributes:
        source: their rows.
        encoder: makes tasks of them.
        shape: of the tasks.
    """

    source: RowSource
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
    data, rollout, evaluation = config.data, config.rollout, config.eval
    if data.eval is None:
        raise DataError("data.eval is not set", hint="give a Parquet or JSONL file")
    source = open_dataset(data.eval, data.prompt_key)
    # Images are seen in an evaluation alone, and not by SGLang.
    images = None if rollout.engine == "sglang" else ImageProcessor.load(Path(config.model.path))
    return HeldOutPrompts(
        source,
        _encoder(config, tokenizer, images),
        dataclasses.replace(
            _shape(config),
            n=evaluation.n,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
        ),
    )


def _encoder(config: Config, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None = None) -> PromptEncoder:
    return PromptEncoder(
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        template_kwargs=config.data.chat_template_kwargs,
        agent=AgentPrompts.of(config.rollout.agent),
        images=images,
    )


def _shape(config: Config, greedy: int = 0) -> TaskShape:
    rollout = config.rollout
    return TaskShape(
        n=rollout.n,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        greedy=greedy,
    )
