"""The data of a run, opened and checked: training prompts, and the tasks of an evaluation round."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.learner.data import AgentPrompts, DataOrder, PromptEncoder, PromptStream, open_dataset
from rollmesh.learner.data.prompts import TaskShape
from rollmesh.learner.evaluation.evaluator import evaluation_tasks
from rollmesh.learner.vision.families import family_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.trajectory.image_files import ImageFiles, image_folder
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
    data, rollout, evaluation = config.data, config.rollout, config.eval
    folder = Path(config.model.path)
    # SGLang is given text alone.
    images = None if rollout.engine == "sglang" else ImageProcessor.load(folder)
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens,
        template_kwargs=data.chat_template_kwargs,
        agent=AgentPrompts.of(rollout.agent),
        images=images if family_of(read_config(folder)) is not None else None,
        files=ImageFiles(image_folder(config)),
    )
    shape = TaskShape(
        n=rollout.n,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        greedy=greedy,
    )
    source = open_dataset(data.train, data.prompt_key)
    order = DataOrder(len(source), seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)
    prompts = PromptStream(source, order, encoder, shape, on_refused=data.on_long_prompt)
    prompts.check()
    if data.eval is None:
        return prompts, None
    held_out = open_dataset(data.eval, data.prompt_key)
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens,
        template_kwargs=data.chat_template_kwargs,
        agent=AgentPrompts.of(rollout.agent),
        images=images,
    )
    eval_shape = dataclasses.replace(shape, n=evaluation.n, temperature=evaluation.temperature, greedy=0)
    return prompts, evaluation_tasks(held_out, encoder, eval_shape, rows=evaluation.rows)
