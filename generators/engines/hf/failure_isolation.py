"""Isolates the request at which a forward pass fails: some wait, some start alone, one is to blame.

A pure state machine: it says how many requests may start, and learns which passes succeeded and which failed.

Invariants:

- A request is blamed only for a pass in which it was alone.
- A request that is blamed `REQUEST_ATTEMPTS` times in a row is to be refused; a successful pass clears it.
- After a failure of many, those that were put back start one at a time, each once the one before it has decoded.
- Where a step fails as one request starts, it is made without that one. If it succeeds now, that one is tried alone; if
  not, one of the others is to blame.
- Where memory ran out nothing starts until enough sequences have ended. A sequence that runs alone and has no room is
  blamed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from rollmesh.generators.engines.types import REQUEST_ATTEMPTS


def out_of_memory(error: Exception) -> bool:
    """True where an allocation failed; torch has no type of its own for it on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class FailureIsolation:
    """The failures of one engine that are not resolved yet."""

    def __init__(self) -> None:
        self._blamed: dict[str, int] = {}
        self._to_isolate = 0
        self._entering: str | None = None
        self._suspect: str | None = None
        self._ceiling: int | None = None

    @property
    def one_at_a_time(self) -> bool:
        """True where requests start alone, and nothing is prefilled ahead."""
        return self._to_isolate > 0

    @property
    def entering(self) -> str | None:
        """The request that started alone and has not decoded yet."""
        return self._entering

    @property
    def suspect(self) -> str | None:
        """The request without which a step is made, to see whether it is to blame."""
        return self._suspect

    def start_limit(self, active: int, free: int) -> int:
        """The number of requests that may start, with `active` running ones and `free` empty slots."""
        if self._ceiling is not None:
            if active > self._ceiling:
                return 0
            self._ceiling = None
        if not active:
            self._suspect = None
        if self._suspect is not None:
            return 0
        if not self._to_isolate:
            return free
        return 0 if self._entering is not None else min(1, free)

    def record_start(self, request_ids: Collection[str]) -> None:
        """Records requests that are about to start."""
        if self._to_isolate and request_ids:
            [self._entering] = request_ids

    def record_success(self, started: Collection[str], ended: Collection[str]) -> None:
        """Records a step that succeeded: `started` got their first token from their prefill, `ended` ended in it."""
        name = self._entering
        if name is not None and (name not in started or name in ended):
            self._clear(name)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended, for any reason."""
        if self._entering is not None and self._entering in request_ids:
            self._clear(self._entering)
        if self._suspect in request_ids:
            self._suspect = None
        for name in self._blamed.keys() & set(request_ids):
            del self._blamed[name]

    def isolate(self, count: int) -> None:
        """Lets `count` more requests, at the head of the queue, start one at a time."""
        self._to_isolate += count
        self._entering = self._suspect = None

    def suspect_entering(self) -> None:
        """Suspects the entering request: a step with it failed, and it has been taken out again."""
        self._suspect, self._entering = self._entering, None

    def wait_for_room(self, ceiling: int) -> None:
        """Starts nothing while more than `ceiling` sequences run."""
        self._ceiling = ceiling
        self._entering = None

    def blame(self, request_id: str) -> bool:
        """Records that a request failed alone; True where it is to be refused. Else it is tried alone once more."""
        self._blamed[request_id] = self._blamed.get(request_id, 0) + 1
        self._to_isolate = max(self._to_isolate, 1)
        self._entering = None
        return self._blamed[request_id] >= REQUEST_ATTEMPTS

    def _clear(self, request_id: str) -> None:
        self._blamed.pop(request_id, None)
        self._entering = None
        self._to_isolate = max(0, self._to_isolate - 1)
