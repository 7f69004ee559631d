"""The answer to each member's last Resume, so that a late copy of the call changes nothing.

A learner numbers its attempts. A copy of the last one gets the same answer again; a copy of an earlier one is refused.
Neither may fence the learner that is in force.
"""

from __future__ import annotations

from dataclasses import dataclass

# Incarnation; groups trained, returned, evicted; the highest ordinal seeded.
ResumeAnswer = tuple[int, int, int, int, int]


class Outdated(Exception):  # noqa: N818  an answer, not a failure of the machine
    """A refusal: the member has made a later attempt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to resume: its number, the version that it asked for, and its answer."""

    call: int
    k: int
    answer: ResumeAnswer


class ResumeAnswers:
    """The last attempt of each member."""

    def __init__(self) -> None:
        self._last: dict[str, Attempt] = {}

    def previous_answer(self, member: str, call: int, k: int) -> ResumeAnswer | None:
        """The answer to a repetition; None for a new attempt.

        Raises:
            Outdated: the copy is of an earlier attempt.
        """
        last = self._last.get(member)
        if last is None or call > last.call:
            return None
        if (call, k) != (last.call, last.k):
            raise Outdated
        return last.answer

    def record(self, member: str, call: int, k: int, answer: ResumeAnswer) -> ResumeAnswer:
        """Keeps the answer to an attempt, and returns it."""
        self._last[member] = Attempt(call, k, answer)
        return answer
