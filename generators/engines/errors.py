"""Errors of engines, as their generator sees them: a broken engine, one request, a configuration that cannot work."""

from __future__ import annotations

from rollmesh.mesh.errors import ConfigError, RollmeshError


class EngineError(RollmeshError):
    """The inference engine cannot continue, or has been stopped.

    Attributes:
        culprit: id of the request that was tried alone (`GenerationRequest.alone`) when it ended; empty where none was.
        raised: what its processes raised last, then.
    """

    code = "engine"
    exit_code = 10
    culprit: str = ""
    raised: str = ""


class RequestError(RollmeshError):
    """The engine failed at one request and lives; the request may succeed another time."""

    code = "request"
    exit_code = 10


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
