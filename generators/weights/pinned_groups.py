"""Groups that need all their answers from the weights in service.

Invariant: new weights wait for them: `finished` returns only when none is in progress and none has begun for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

# Weights are held this much longer after the last group. The next of its round may be on their way, and once every
# generator has newer weights none could answer them.
QUIET_S = 0.25


class PinnedGroups:
    """The pinned groups in progress; shared by rollout loop and weight receiver. Used in one event loop."""

    def __init__(self) -> None:
        self._groups: set[Hashable] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._quiet_at = 0.0
        self._cancel_swap: Callable[[], None] = _no_swap

    @property
    def active(self) -> bool:
        """True while one is in progress."""
        return bool(self._groups)

    def begin(self, group: Hashable) -> None:
        """Adds a group that needs the weights in service."""
        self._groups.add(group)
        self._none.clear()

    def end(self, group: Hashable) -> None:
        """Removes a group that needs them no longer; one that is not pinned is ignored."""
        if group in self._groups:
            self._groups.discard(group)
            if not self._groups:
                self._none.set()
                self._quiet_at = asyncio.get_running_loop().time() + QUIET_S

    async def finished(self) -> None:
        """Waits until no group needs the weights in service, and none came for `QUIET_S`."""
        loop = asyncio.get_running_loop()
        while not self._none.is_set() or loop.time() < self._quiet_at:
            await self._none.wait()
            await asyncio.sleep(self._quiet_at - loop.time())

    def set_cancel_swap(self, cancel_swap: Callable[[], None]) -> None:
        """Sets the function that `hold_swap` calls."""
        self._cancel_swap = cancel_swap

    def hold_swap(self) -> None:
        """Cancels a swap that the engine has not begun; it is requested again after `finished`.

        For episodes of several turns under one version: the engine knows nothing of them between their turns.
        """
        self._cancel_swap()


def _no_swap() -> None:
    """Nothing swaps weights here."""
