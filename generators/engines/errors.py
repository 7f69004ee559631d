"""Errors that end an engine, as its generator sees them: a configuration that cannot work, or a broken engine."""

from __future__ import annotations

from rollmesh.generators.engines.interface import EngineError
from rollmesh.mesh.errors import ConfigError


class EngineSettingsError(EngineError):
    """The engine cannot work as it is configured: a restart would end the same way."""

    code = "engine_settings"
    exit_code = ConfigError.exit_code


def ending_of(error: BaseException) -> EngineError:
    """The engine's own error of any error that ended it, which is its cause."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, ConfigError):
        failure: EngineError = EngineSettingsError(error.message, hint=error.hint)
    else:
        failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
