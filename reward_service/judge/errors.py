"""The ways in which a judge gives no verdict; none of them is a score.

Invariant: an error says whether the same item may succeed later. A request for which there was no room is no failure:
its item is sent again for as long as it takes.
"""

from __future__ import annotations

from typing import ClassVar

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed


class JudgeError(RewardError):
    """Base of them all.

    Attributes:
        code: of the item's outcome.
        retryable: true if the same item may succeed later.
    """

    retryable: ClassVar[bool] = False

    def outcome(self) -> Failed:
        """The outcome of an item."""
        return Failed(self.code, f"judge: {self}", self.retryable)


class BusyError(JudgeError):
    """There is no room for a request in time, by our limits or the endpoint's."""

    code = NOT_BEGUN
    retryable = True


class ThrottledError(BusyError):
    """The endpoint answers 429.

    Attributes:
        retry_after_s: seconds after which it may be asked, as it says; None: it does not.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(JudgeError):
    """No answer: the connection failed, took too long, or the endpoint has a fault of its own.

    Attributes:
        retry_after_s: as of `ThrottledError`.
    """

    code = "judge_unavailable"
    retryable = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AnswerError(JudgeError):
    """An answer that is no verdict; the next one may be."""

    code = "judge_answer"
    retryable = True


class RefusedError(JudgeError):
    """The endpoint does not take such requests: a wrong key, model or option, or a quota that is used up."""

    code = "judge_refused"


class SpentError(JudgeError):
    """The budget is spent."""

    code = "judge_budget"
