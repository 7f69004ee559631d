"""Refusals in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from rollmesh.mesh.errors import RollmeshError

INVALID = "invalid_request_error"
# Characters of a path that are repeated.
_SHOWN = 200


class ApiError(RollmeshError):
    """The refusal of a call.

    Args:
        status: HTTP status.
        message: what is wrong.
        reason: OpenAI's `code`; empty: none.
        param: the offending field of the request; empty: none.
        kind: OpenAI's `type`.
        retry_after_s: when it is worth asking again; None: never.
    """

    code = "endpoint"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str = "",
        param: str = "",
        kind: str = INVALID,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body of the refusal."""
        error = {"message": self.message, "type": self.kind, "param": self.param or None, "code": self.reason or None}
        return {"error": error}


def too_long(tokens: int, limit: int, param: str) -> ApiError:
    """The refusal of a prompt that leaves no room for an answer; it has `tokens` tokens or more."""
    return ApiError(
        400,
        f"the prompt has {tokens} tokens or more, but prompt and answer together may have at most {limit}",
        reason="context_length_exceeded",
        param=param,
    )


def no_model(requested: str, model: str) -> ApiError:
    """The refusal of a call to a model that is not served here."""
    message = f"the model {requested[:64]!r} does not exist: {model!r} is served here"
    return ApiError(404, message, reason="model_not_found", param="model")


def no_path(method: str, path: str) -> ApiError:
    """The refusal of a call to a path that is not served here."""
    hint = "a client's base URL ends with /v1, and after it come chat/completions, completions or models"
    if path.endswith("/responses"):
        hint = "the Responses API is not served: set the client to chat completions"
    return ApiError(404, f"{method} {path[:_SHOWN]}: Not Found; {hint}", reason="not_served")


def overloaded(message: str) -> ApiError:
    """The refusal of too many calls at once."""
    return ApiError(429, message, reason="rate_limit_exceeded", kind="rate_limit_error", retry_after_s=1)


def not_ready(message: str) -> ApiError:
    """The refusal of a call that cannot be answered yet."""
    return ApiError(503, message, reason="not_ready", kind="server_error", retry_after_s=1)


def session_ended(name: str) -> ApiError:
    """The refusal of a call in a session that is over."""
    return ApiError(410, f"session {name} is over", reason="session_over")


def session_full(name: str, reason: str) -> ApiError:
    """The refusal of a call in a session without room for another answer."""
    return ApiError(400, f"session {name} has {reason}: begin another one", reason="session_full")
