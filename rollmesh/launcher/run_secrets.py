"""The secrets that a run makes for itself, so that a run without named secrets is closed to other users too.

Invariants: each file is created with mode 0600 and never written again. So services of an earlier launch and commands
on the run folder agree on it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollmesh.mesh.access.secret import new_token
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

# Below the run folder.
TOKEN, ENDPOINT_KEY, METRICS_KEY = "token", "endpoint.key", "metrics.key"


def with_own_secrets(config: Config) -> Config:
    """The configuration with the run's own token and keys where it names none; nothing is written."""
    folder, security = config.run.folder.absolute(), config.security
    own = {
        "token_file": security.token_file or folder / TOKEN,
        "endpoint_key_file": security.endpoint_key_file or folder / ENDPOINT_KEY,
        "metrics_key_file": security.metrics_key_file or folder / METRICS_KEY,
    }
    return config.model_copy(update={"security": security.model_copy(update=own)})


def make_secrets(folder: Path) -> None:
    """Makes the missing ones of a run's own secrets.

    Raises:
        ConfigError: they cannot be written.
    """
    for name in (TOKEN, ENDPOINT_KEY, METRICS_KEY):
        path, scratch = folder / name, folder / f".{name}.{os.getpid()}"
        if path.exists():
            continue
        try:
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{new_token()}\n")
            scratch.rename(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
