"""Typed errors across gRPC: the status that each class becomes, and the class that comes back from a failed call.

Invariant: a `RollmeshError` that a handler raises reaches the caller as the same class, with message, hint and field.
"""

from __future__ import annotations

from typing import Any

import grpc

from rollmesh.mesh import errors
from rollmesh.mesh.access.tls import unreached_hint
from rollmesh.mesh.errors import RollmeshError, UnauthenticatedError, UnreachableError
from rollmesh.mesh.text import showable

_STATUS = {
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "config": grpc.StatusCode.INVALID_ARGUMENT,
    "data": grpc.StatusCode.INVALID_ARGUMENT,
    "payload": grpc.StatusCode.INVALID_ARGUMENT,
    "store": grpc.StatusCode.UNAVAILABLE,
    "unreachable": grpc.StatusCode.UNAVAILABLE,
    "fenced": grpc.StatusCode.FAILED_PRECONDITION,
    "takeover_refused": grpc.StatusCode.FAILED_PRECONDITION,
    "old_generation": grpc.StatusCode.FAILED_PRECONDITION,
    "lost_state": grpc.StatusCode.FAILED_PRECONDITION,
    "role_lost": grpc.StatusCode.FAILED_PRECONDITION,
    "weights": grpc.StatusCode.NOT_FOUND,
}
# Failures of the connection or of the service: the same call may succeed later.
_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
# Details of the status INTERNAL that gRPC's client makes up where it could not write.
_LOCAL_FAILURE = "Internal error from Core"


def to_rollmesh_error(error: grpc.RpcError, what: str) -> RollmeshError:
    """Turns a failed call into the typed error that the service raised, or `UnreachableError`.

    Args:
        error: as caught (`grpc.aio.AioRpcError`).
        what: names the call and the address for the reader.
    """
    status = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    # The words of another program.
    details = showable((error.details() if isinstance(error, grpc.aio.AioRpcError) else None) or str(error))
    trailing = dict(_trailing(error) or ())
    cls = _error_classes().get(str(trailing.get("rollmesh-code", "")))
    hint = str(trailing.get("rollmesh-hint", ""))
    if cls is errors.PayloadError:
        return errors.PayloadError(str(trailing.get("rollmesh-field", "message")), details, hint=hint)
    if cls is not None:
        return cls(details, hint=hint)
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(f"{what}: {details}", hint="does it require a token of its own?")
    if is_transient(error):
        return UnreachableError(f"{what}: {details}", hint=unreached_hint(details))
    return RollmeshError(f"{what}: {status.name if status else 'failed'}: {details}")


def _trailing(error: grpc.RpcError) -> Any:
    return error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None


def is_transient_code(code: grpc.StatusCode) -> bool:
    """True if repeating a call with this status may help (connection lost, deadline, store briefly away)."""
    return code in _TRANSIENT


def is_transient(error: BaseException) -> bool:
    """True if repeating the call that raised this may help."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    # A message that is written while its stream ends fails in the client. There gRPC then reports that in place of the
    # status with which the stream ended. The next try gets the true status.
    lost_status = error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOCAL_FAILURE
    return lost_status or is_transient_code(error.code())


async def abort(context: Any, error: RollmeshError) -> None:
    """Ends a call with a typed error."""
    trailing = [("rollmesh-code", error.code), ("rollmesh-hint", _ascii(error.hint))]
    if isinstance(error, errors.PayloadError):
        trailing.append(("rollmesh-field", _ascii(error.field)))
    await context.abort(_status_of(error), error.message, trailing_metadata=tuple(trailing))


def _status_of(error: RollmeshError) -> grpc.StatusCode:
    """The status of the error's class, or of its nearest base class that has one."""
    codes = (getattr(cls, "code", "") for cls in type(error).__mro__)
    return next((_STATUS[code] for code in codes if code in _STATUS), grpc.StatusCode.INTERNAL)


def _ascii(text: str) -> str:
    """The text as metadata may hold it: without control characters, which gRPC refuses."""
    return "".join(c if " " <= c <= "~" else " " if c == "\n" else "?" for c in text)


def _error_classes() -> dict[str, type[RollmeshError]]:
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return {cls.code: cls for cls in found if issubclass(cls, RollmeshError)}
