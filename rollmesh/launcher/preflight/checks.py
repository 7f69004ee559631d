"""Checks of a run that take a moment, before any service is started."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rollmesh.launcher.interpreters import check_interpreters
from rollmesh.launcher.preflight.trial import StartTrial, try_learner
from rollmesh.launcher.services import interpreters_of, needs_reward_service
from rollmesh.learner.model_files.checks import check_context, check_model_files, declared_context, read_model_config
from rollmesh.mesh.access.secret_files import check_keys, check_security
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.reward_service.loading import is_path, load_function
from rollmesh.reward_service.routing import split_routes

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
# A module that loads a model when it is imported takes longer; its service waits for it.
_REWARD_S = 20.0
_LEARNER_S = 120.0


def check_files(config: Config) -> None:
    """Refuses a run with wrong files or interpreters, at once.

    Raises:
        ConfigError: an unusable file of a secret; an interpreter that cannot run its service; a model's too short
            context; one port for two services.
        DataError: model folders or data files are not there, or are damaged.
        RewardError: an unknown scorer.
    """
    if config.network.metrics_port:
        raise ConfigError(
            "network.metrics_port is one, and all services of this run share this machine",
            hint="leave it out: each service takes a free port, and its log names it",
        )
    check_security(config.security, None, endpoint=True)
    check_keys(config)
    _check_inputs(config)
    check_interpreters(interpreters_of(config))
    for name in _reward_functions(config):
        if not is_path(name):
            load_function(name)


def check_code(config: Config, *, fresh: bool = False) -> list[str]:
    """Refuses a run that would end as soon as its services have loaded their code; takes a second or more.

    Args:
        config: of the run.
        fresh: it starts over, whatever is in its folder.

    Returns:
        Notices about valid settings, a sentence each.

    Raises:
        ConfigError: the algorithm's settings are wrong, or it needs something that the configuration does not provide;
            a function of the user's is not there.
        DataError: a row of the data lacks a needed field; generators do not serve the model; the run's checkpoint is
            another algorithm's.
        RewardError: a reward function cannot be loaded.
    """
    with ExitStack() as trials:
        tried = []
        # Where a program has torch already, another process would only load it again.
        here = config.learner.python is None and "torch" in sys.modules
        if not here:
            tried.append(StartTrial("learner", config, config.learner.python, _LEARNER_S, fresh=fresh))
        if any(map(is_path, _reward_functions(config))):
            python = config.reward.python if needs_reward_service(config) else config.rollout.python
            tried.append(StartTrial("reward", config, python, _REWARD_S))
        for trial in tried:
            trials.callback(trial.close)
        notices = try_learner(config, fresh=fresh) if here else []
        for trial in tried:
            notices += trial.result()
    return notices


def _check_inputs(config: Config) -> None:
    models = {"model.path": config.model.path}
    models |= {f"learner.roles.{name}.path": role.path for name, role in config.learner.roles.items() if role.path}
    for key, path in models.items():
        _check_model(key, path)
    if (folder := Path(config.model.path)).is_dir():
        check_context(declared_context(read_model_config(folder, "model.path")), config.rollout.context_tokens)
    for key, file in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if file is not None and not file.is_file():
            raise DataError(f"{key}: no such file: {file}", hint="give a Parquet or JSONL file")


def _check_model(key: str, path: str) -> None:
    """A model is a folder, or looks like a hub id."""
    folder = Path(path)
    if folder.is_dir():
        check_model_files(folder, key, tokenizer=key == "model.path")
        from rollmesh.learner.model_files.location import refuse_untrainable

        refuse_untrainable(folder, key.removesuffix(".path"))
    elif not _HUB_ID.match(path):
        raise DataError(f"{key}: no such folder: {folder}", hint="give a Hugging Face model folder or a hub id")


def _reward_functions(config: Config) -> Iterator[str]:
    """Reward functions that are loaded here: by the reward service, or by generators."""
    if not (needs_reward_service(config) or config.reward.in_process):
        return
    yield from config.reward.functions
    for names in split_routes(config.reward.by_data_source)[0].values():
        yield from names
