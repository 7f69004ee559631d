"""The times of one call for scores: until when its items may be begun, and by when all must be answered."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

# What an answer needs besides the item's own time: a worker that is overdue is ended first.
GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Times:
    """Monotonic times; `begin_by` is at most `deadline`."""

    begin_by: float
    deadline: float

    @classmethod
    def within(cls, timeout_s: float, call_timeout_s: float) -> Self:
        """The times of a call that gets `timeout_s`, of which each item may take `call_timeout_s`.

        What is begun by then is done by the deadline, unless the call has hardly the time of a single item: then items
        may be begun in its first half, and those that take longer than the other half are cut off.
        """
        now = time.monotonic()
        room = max(timeout_s - call_timeout_s - GRACE_S, timeout_s / 2)
        return cls(now + room, now + timeout_s)
