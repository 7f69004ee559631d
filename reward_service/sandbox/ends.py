"""The ends of a job's runs, while they become known."""

from __future__ import annotations

from collections.abc import Callable

from rollmesh.reward_service.sandbox.interface import Ran


class Ends:
    """The ends of a job's runs, in the order of their inputs."""

    def __init__(self, count: int, stop: Callable[[Ran], bool] | None) -> None:
        self.known: list[Ran] = []
        self._count = count
        self._stop = stop

    def record(self, ran: Ran) -> bool:
        """Adds the end of the next input; true if it is the last one."""
        self.known.append(ran)
        stopped = self._stop is not None and self._stop(ran)
        return stopped or len(self.known) == self._count

    def filled(self, reason: str) -> list[Ran]:
        """All ends; those that are not known never ran, for this reason."""
        while len(self.known) < self._count and not self.record(Ran("infrastructure", reason=reason)):
            pass
        return self.known
