"""What ends an engine, in the words for its generator: a configuration that cannot work, or an engine that broke."""

from __future__ import annotations

from rollmesh.generators.engines.interface import EngineError
from rollmesh.mesh.errors import ConfigError


class EngineSettingsError(EngineError):
    """The engine cannot work as it is configured: a restart would end the same way."""

    code = "engine_settings"
    exit_code = ConfigError.exit_code


def ending_of(error: BaseException) -> EngineError:
    """What an error makes of the engine, caused by it."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, ConfigError):
        failure: EngineError = EngineSettingsError(error.message, hint=error.hint)
    else:
        failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
