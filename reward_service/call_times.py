"""The times of one call for scores: until when its items may be begun, and by when all must be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

# Seconds that an answer needs in addition to the item's own time: an overdue worker is ended first.
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Monotonic times; `begin_by` is at most `deadline`."""

    begin_by: float
    deadline: float

    @classmethod
    def within(cls, timeout_s: float, call_timeout_s: float) -> Self:
        """The times of a call that gets `timeout_s`, of which each item may take `call_timeout_s`.

        An item begun by `begin_by` is done by the deadline, unless the call has hardly the time of a single item. Then
        items may be begun in its first half, and those that take longer than the other half are cut off.
        """
        now = time.monotonic()
        begin_s = max(timeout_s - call_timeout_s - GRACE_S, timeout_s / 2)
        return cls(now + begin_s, now + timeout_s)

    def stage(self, number: int, of: int) -> CallTimes:
        """The times of one of several stages, which an item goes through one after another.

        Args:
            number: of the stage, from 0.
            of: the number of stages; these times have to be `within` a call whose items take as many times as long.
        """
        span = (self.deadline - self.begin_by) / of
        return CallTimes(self.begin_by + number * span, self.begin_by + (number + 1) * span)
