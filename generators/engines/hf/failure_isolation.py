"""What becomes of requests when a forward pass fails: who waits, who goes in alone, who is to blame.

A pure state machine; the loop asks it how many requests may start, and tells it what passed and what failed.

Invariants:

- A request is blamed only for a pass in which it was alone.
- Who is blamed `REQUEST_ATTEMPTS` times in a row is to be refused; who passes is cleared.
- After a failure of many, those that were put back go in one at a time, each once the one before it has decoded.
- Where a step fails as one enters, it is made without that one. If it passes now, that one is tried alone; if it does
  not, one of the others is to blame.
- Where memory ran out nothing starts until enough of what runs has ended; what runs alone and finds no room is blamed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from rollmesh.generators.engines.interface import REQUEST_ATTEMPTS


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has no type of its own for it on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class Caution:
    """What one engine has learned from failures that it has not got over yet."""

    def __init__(self) -> None:
        self._blamed: dict[str, int] = {}
        self._to_enter = 0
        self._entering: str | None = None
        self._suspect: str | None = None
        self._ceiling: int | None = None

    @property
    def one_at_a_time(self) -> bool:
        """Requests go in alone, and nothing is prefilled ahead."""
        return self._to_enter > 0

    @property
    def entering(self) -> str | None:
        """The request that went in alone and has not decoded yet."""
        return self._entering

    @property
    def suspect(self) -> str | None:
        """The request without which a step is made, to see whether it is to blame."""
        return self._suspect

    def most(self, active: int, free: int) -> int:
        """How many requests may start besides `active` running ones where `free` slots are empty."""
        if self._ceiling is not None:
            if active > self._ceiling:
                return 0
            self._ceiling = None
        if not active:
            self._suspect = None
        if self._suspect is not None:
            return 0
        if not self._to_enter:
            return free
        return 0 if self._entering is not None else min(1, free)

    def enters(self, request_ids: Collection[str]) -> None:
        """These are about to start."""
        if self._to_enter and request_ids:
            [self._entering] = request_ids

    def passed(self, started: Collection[str], ended: Collection[str]) -> None:
        """A step went well: `started` were given their first token by their prefill, `ended` have ended in it."""
        name = self._entering
        if name is not None and (name not in started or name in ended):
            self._leaves(name)

    def gone(self, request_ids: Collection[str]) -> None:
        """They have ended, whatever the reason."""
        if self._entering is not None and self._entering in request_ids:
            self._leaves(self._entering)
        if self._suspect in request_ids:
            self._suspect = None
        for name in self._blamed.keys() & set(request_ids):
            del self._blamed[name]

    def separate(self, count: int) -> None:
        """So many requests more, at the head of the line, go in one at a time."""
        self._to_enter += count
        self._entering = self._suspect = None

    def suspects(self) -> None:
        """A step failed beside the one that was entering, which has left it again."""
        self._suspect, self._entering = self._entering, None

    def wait_for_room(self, ceiling: int) -> None:
        """Nothing starts while more than `ceiling` run."""
        self._ceiling = ceiling
        self._entering = None

    def blame(self, request_id: str) -> bool:
        """It failed alone; True where it is to be refused. Else it goes in once more, alone again."""
        self._blamed[request_id] = self._blamed.get(request_id, 0) + 1
        self._to_enter = max(self._to_enter, 1)
        self._entering = None
        return self._blamed[request_id] >= REQUEST_ATTEMPTS

    def _leaves(self, request_id: str) -> None:
        self._blamed.pop(request_id, None)
        self._entering = None
        self._to_enter = max(0, self._to_enter - 1)
