"""Checks of a run that take a moment, before any service is started."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from rollmesh.launcher.interpreters import check_interpreters, environment_of
from rollmesh.launcher.placement.description import core_notices, placement_notices, rest_notices
from rollmesh.launcher.placement.devices import DevicePlan, device_plan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.preflight.trial import StartTrial, try_learner, try_model
from rollmesh.launcher.services import interpreters_of, learner_environment, needs_reward_service, thread_plan
from rollmesh.learner.data.locations import data_files, is_hub_id
from rollmesh.learner.folder_facts.given_path import is_folder
from rollmesh.learner.model_files.checks import (
    check_context,
    check_model_files,
    check_role_tokens,
    declared_context,
    read_model_config,
    refuse_classifier,
)
from rollmesh.mesh.access.secret_files import check_keys, check_security
from rollmesh.mesh.config.derived.memory_release import REST_KEY, rest_folder
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.scorers.parts import all_uses
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.files import require_writable
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.threads import available_cores, thread_environment
from rollmesh.reward_service.configured import is_configured
from rollmesh.reward_service.loading import is_path, load_function
from rollmesh.reward_service.routing import split_routes
from rollmesh.run_files import RUN, check_command

# A module that loads a model when it is imported takes longer; its service waits for it.
_REWARD_S = 20.0
_LEARNER_S = 120.0


def check_files(config: Config) -> None:
    """Refuses a run with wrong files or interpreters, at once.

    Raises:
        ConfigError: an unusable file of a secret; an interpreter that cannot run its service; a model's too short
            context; one port for two services. Several nodes are refused too.
        DataError: model folders or data files are not there, or are damaged.
        RewardError: an unknown scorer.
    """
    if config.network.metrics_port:
        raise ConfigError(
            "network.metrics_port is one, and all services of this run share this machine",
            hint="leave it out: each service takes a free port, and its log names it",
        )
    if config.learner.distributed.nodes > 1:
        raise ConfigError(
            f"learner.distributed.nodes is {config.learner.distributed.nodes}, and `rollmesh run` starts one machine",
            hint="start the services one by one, and rollmesh learner --node N on each node (deploy/README.md: Slurm)",
        )
    check_security(config.security, None, endpoint=True)
    check_keys(config)
    _check_inputs(config)
    check_interpreters(interpreters_of(config))
    for name in _reward_functions(config):
        if not (is_path(name) or is_configured(name)):
            load_function(name)


def check_code(config: Config, *, fresh: bool = False, fork_server: ForkServer | None = None) -> Preparation:
    """Refuses a run that would end as soon as its services have loaded their code; takes a second or more.

    Args:
        config: of the run.
        fresh: it starts over, whatever is in its folder.
        fork_server: forks trials if that is possible; None: all are executed.

    Raises:
        ConfigError: a setting of the algorithm is wrong, or something that it needs is not configured. A function of
            the user's is not there. The devices do not suffice. The learner's state cannot be written to
            `placement.rest_dir`. The folder is that of a training on data.
        DataError: a row of the data lacks a needed field; generators do not serve the model; the run's checkpoint is
            another algorithm's.
        RewardError: a reward function cannot be loaded.
    """
    if not fresh:
        check_command(config.run.folder, RUN)
    devices = device_plan(config)
    _check_rest(config, devices)
    with (
        _learner_trial("learner", config, devices, fork_server, fresh=fresh) as learner,
        _reward_trial(config, fork_server) as reward,
    ):
        notices = learner.result() if learner is not None else try_learner(config, fresh=fresh)
        of_reward = reward.result() if reward is not None else []
    return Preparation(
        devices,
        [
            *notices,
            *of_reward,
            *placement_notices(config, devices),
            *rest_notices(config, devices),
            *core_notices(config, devices, available_cores()),
        ],
    )


def check_evaluation(config: Config, fork_server: ForkServer | None = None) -> Preparation:
    """Refuses an evaluation whose model or reward functions cannot be loaded; nothing of an algorithm is tried.

    Args:
        config: of the evaluation; the model's path is a local folder.
        fork_server: see `check_code`.

    Raises:
        ConfigError: the devices do not suffice.
        DataError: the model's folder cannot be used.
        RewardError: a reward function cannot be loaded.
    """
    devices = device_plan(config)
    with (
        _learner_trial("model", config, devices, fork_server) as model,
        _reward_trial(config, fork_server) as reward,
    ):
        of_model = model.result() if model is not None else try_model(config)
        of_reward = reward.result() if reward is not None else []
    return Preparation(devices, [*of_model, *of_reward])


def _learner_trial(
    what: str, config: Config, devices: DevicePlan, fork_server: ForkServer | None, *, fresh: bool = False
) -> AbstractContextManager[StartTrial | None]:
    """In the learner's environment; None if it would have to load torch, and this program has it already."""
    if fork_server is None and config.learner.python is None and "torch" in sys.modules:
        return nullcontext()
    environment = learner_environment(config, thread_plan(config), devices)
    return closing(
        StartTrial(what, config, config.learner.python, environment, _LEARNER_S, fresh=fresh, fork_server=fork_server)
    )


def _reward_trial(config: Config, fork_server: ForkServer | None) -> AbstractContextManager[StartTrial | None]:
    if not any(is_path(name) or is_configured(name) for name in _reward_functions(config)):
        return nullcontext()
    python = config.reward.python if needs_reward_service(config) else config.rollout.python
    return closing(
        StartTrial(
            "reward",
            config,
            python,
            {**thread_environment(1), **environment_of(python)},
            _REWARD_S,
            fork_server=fork_server,
        )
    )


def _check_rest(config: Config, devices: DevicePlan) -> None:
    """The run's own folder, which is the default, is made and tested later."""
    folder = rest_folder(config, on_cpu=not devices.learner)
    if folder is not None and folder == config.placement.rest_dir:
        require_writable(folder, REST_KEY)


def _check_inputs(config: Config) -> None:
    models = {"model.path": config.model.path}
    here = {name: role.path for name, role in config.learner.roles.items() if role.at != "elsewhere"}
    models |= {f"learner.roles.{name}.path": path for name, path in here.items() if path}
    for key, path in models.items():
        _check_model(key, path)
    if (folder := Path(config.model.path)).is_dir():
        for key, path in models.items():
            if Path(path).is_dir():
                check_role_tokens(folder, Path(path), key)
        check_context(declared_context(read_model_config(folder, "model.path")), config.rollout.context_tokens)
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        for source in sources:
            if not is_hub_id(source.path):
                _check_source(key, source)


def _check_source(key: str, source: DataSource) -> None:
    try:
        data_files(source)
    except DataError as error:
        raise DataError(f"{key}: {error.message}", hint=error.hint) from error


def _check_model(key: str, path: str) -> None:
    """A model is a folder, or looks like a hub id."""
    if is_folder(path, key):
        folder = Path(path)
        check_model_files(folder, key, tokenizer=key == "model.path")
        from rollmesh.learner.model_files.location import refuse_untrainable

        refuse_untrainable(folder, key)
        if key == "model.path":
            refuse_classifier(folder, key)


def _reward_functions(config: Config) -> list[str]:
    """Reward functions that are loaded here: by the reward service, or by generators."""
    if not (needs_reward_service(config) or config.reward.in_process):
        return []
    return all_uses(config.reward.functions, split_routes(config.reward.by_data_source)[0])
