"""End tokens of the model of a run or a training, as its configuration writes turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.chat.end_tokens import end_tokens
from rollmesh.mesh.config.inputs import SourcesSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import RewardModelConfig, TrainerConfig
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.tokenizer_files import load_optional_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_arguments(data: SourcesSection) -> list[Mapping[str, Any]]:
    """The arguments of the chat template, in each set that some source of the training data has."""
    found: list[Mapping[str, Any]] = []
    for source in data.train:
        arguments = {**data.chat_template_kwargs, **source.chat_template_kwargs}
        if arguments not in found:
            found.append(arguments)
    return found


def ends_of(config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens at which the responses of a run stop.

    Args:
        config: of the run.
        folder: of its model.
        tokenizer: of it.

    Raises:
        DataError: the model's configuration cannot be read.
    """
    return end_tokens(folder, read_config(folder), tokenizer, template_arguments(config.data)).all


def end_notices(config: Config | TrainerConfig) -> list[str]:
    """Words about trained ends that the model's files do not name; none of a model that is not local, or that scores.

    Args:
        config: of a run or a training.

    Raises:
        DataError: the model's configuration or tokenizer cannot be read.
    """
    folder = Path(config.model.path)
    if isinstance(config, RewardModelConfig) or not (folder / "config.json").is_file():
        return []
    if (tokenizer := load_optional_tokenizer(folder)) is None:
        return []
    ends = end_tokens(folder, read_config(folder), tokenizer, template_arguments(config.data))
    notice = ends.notice(tokenizer, "model.path")
    return [] if notice is None else [notice]
