"""Statuses of an endpoint as typed errors, and the waits between tries: pure decisions."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from rollmesh.reward_service.judge.errors import JudgeError, RefusedError, ThrottledError, UnavailableError

_FIRST_S = 0.25
_LONGEST_S = 8.0
_SHOWN = 300
# A status of some gateways for too many requests.
_OVERLOADED = 529


def status_error(status: int, retry_after: str | None, text: str, now: datetime) -> JudgeError:
    """The error of an answer other than 200.

    Args:
        status: of HTTP.
        retry_after: the header; None: there is none.
        text: the body.
        now: the time, for a header with a date.
    """
    message = f"the endpoint answers {status}: {text[:_SHOWN].strip()}".removesuffix(": ")
    wait_s = None if retry_after is None else seconds_of(retry_after, now)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        # A quota does not come back with time; OpenAI's status is the same.
        if "insufficient_quota" in text:
            return RefusedError(message, hint="the account of the judge has no credit left")
        return ThrottledError(message, wait_s)
    if status in (_OVERLOADED, HTTPStatus.SERVICE_UNAVAILABLE) and wait_s is not None:
        return ThrottledError(message, wait_s)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.REQUEST_TIMEOUT:
        return UnavailableError(message, wait_s)
    hints = {
        HTTPStatus.UNAUTHORIZED: "give a file with its key: reward.judge.api_key_file",
        HTTPStatus.FORBIDDEN: "the key may not use this model",
        HTTPStatus.NOT_FOUND: "reward.judge.base_url ends with /v1 for most servers, and reward.judge.model is theirs",
    }
    return RefusedError(message, hint=hints.get(HTTPStatus(status), "") if status in set(HTTPStatus) else "")


def seconds_of(retry_after: str, now: datetime) -> float | None:
    """The header's seconds, or those until its date; None where it is neither."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = parsedate_to_datetime(retry_after)
        except (ValueError, OverflowError):
            return None
        seconds = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - now).total_seconds()
    # False for what is not a number.
    return max(0.0, seconds) if seconds < float("inf") else None


def backoff_s(failures: int, jitter: float) -> float:
    """Seconds before the next try.

    Args:
        failures: so far, at least 1.
        jitter: drawn evenly from 0 to 1, so that requests that failed together do not come together again.
    """
    return jitter * min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures, 16))
