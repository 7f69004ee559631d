"""What can be said about a configuration in a moment, before any service is started."""

from __future__ import annotations

import re
from pathlib import Path

from mesh.config.models import Config
from mesh.errors import DataError
from rollmesh.launcher.interpreters import check_interpreters
from rollmesh.launcher.services import interpreters_of

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def check_run(config: Config) -> None:
    """Refuses a run that would end as soon as its learner has started.

    Raises:
        ConfigError: the algorithm's settings are wrong, or it needs what the configuration does not provide; a
            function of the user's is not there; an interpreter cannot run its service.
        DataError: model folders or data files are not there.
    """
    _check_inputs(config)
    check_interpreters(interpreters_of(config))
    # Needs torch, which takes a second to import; whatever it finds would otherwise show after all services are up.
    from learner.build import build_algorithm
    from learner.priorities import priority_function

    build_algorithm(config)
    priority_function(config)


def _check_inputs(config: Config) -> None:
    models = {"model.path": config.model.path}
    models |= {f"learner.roles.{name}.path": role.path for name, role in config.learner.roles.items() if role.path}
    for key, path in models.items():
        _check_model(key, path)
    for key, file in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if file is not None and not file.is_file():
            raise DataError(f"{key}: no such file: {file}", hint="give a Parquet or JSONL file")


def _check_model(key: str, path: str) -> None:
    """A model is a folder, or looks like a hub id."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataError(f"{key}: {folder} has no config.json", hint="give a Hugging Face model folder or a hub id")
        from learner.model_folder import refuse_untrainable

        refuse_untrainable(folder, key.removesuffix(".path"))
    elif not _HUB_ID.match(path):
        raise DataError(f"{key}: no such folder: {folder}", hint="give a Hugging Face model folder or a hub id")
