"""Keys of the configuration with other values: applied, and as they are given on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with other values of some keys.

    Raises:
        ConfigError: they contradict the rest.
    """
    overrides = [f"{key}={_as_yaml(value)}" for key, value in settings.items()]
    return load_config(config.model_dump(mode="json", exclude_unset=True), overrides)


def flags(settings: Mapping[str, Any]) -> str:
    """Keys as they are given on the command line."""
    return " ".join(f"--{key}={_as_yaml(value)}" for key, value in settings.items())


def _as_yaml(value: Any) -> str:
    """A plain value as an override of the configuration has it."""
    return value if isinstance(value, str) else json.dumps(value)
