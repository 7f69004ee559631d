"""The calls of a session: each number is done once, however often it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rollmesh.mesh.errors import PayloadError, RoleLostError

T = TypeVar("T")


class NumberedCalls(Generic[T]):
    """Calls with the numbers 1, 2, 3 ..., of which the last one's outcome is kept.

    A caller makes one call at a time. So a call with the last number is a repetition, and one with an older number is a
    copy that was late.
    """

    def __init__(self) -> None:
        self._last = 0
        self._outcome: T | None = None

    def begin(self, number: int, start: Callable[[], T]) -> T:
        """The outcome of a call; starts it where it is the next one.

        Args:
            number: of the call.
            start: does what is asked for, and gives its outcome (a future).

        Raises:
            PayloadError: the number is an older one.
            RoleLostError: calls before this one have not come.
        """
        if number == self._last + 1:
            outcome = start()
            self._last, self._outcome = number, outcome
            return outcome
        if number == self._last and self._outcome is not None:
            return self._outcome
        if number <= self._last:
            raise PayloadError("call.number", f"{number} is over: {self._last} has come since")
        raise RoleLostError(f"call {number} has come, and of the calls before it only {self._last}")
