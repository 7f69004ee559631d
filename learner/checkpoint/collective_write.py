"""Work of which every rank does a part: where it fails on one, it fails on all, in the same words.

Invariant: no rank waits for one that has given up, and none continues without it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.world import gather_bytes


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks, as seen by one of them.

    Attributes:
        process, processes: the number of this one, and how many there are.
        gather_bytes: gives every rank's message, in the order of the ranks; collective.
    """

    process: int
    processes: int
    gather_bytes: Callable[[bytes], list[bytes]]

    @classmethod
    def of(cls, engine: Engine) -> Ranks:
        """The ranks of an engine, for the thread that trains."""
        return cls(engine.layout.process, engine.layout.processes, engine.world.gather_bytes)

    @classmethod
    def apart(cls, engine: Engine) -> Ranks:
        """The same ranks with connections of their own, for one thread that does not train; collective."""
        layout = engine.layout
        group = engine.world.lend_group()
        if layout.processes == 1 or group is None:
            return cls(0, 1, lambda message: [message])
        return cls(layout.process, layout.processes, partial(gather_bytes, group=group))

    @property
    def leads(self) -> bool:
        """This is rank 0, which makes and renames folders."""
        return self.process == 0

    def on_every_rank(self, part: Callable[[], object]) -> None:
        """Does this rank's part and waits for the others; collective.

        Raises:
            OSError: on every rank, where a part has failed on any; names the first rank that met each failure.
            Exception: this rank's own failure, if it is not an OSError.
        """
        failure, own = "", None
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            if isinstance(error, OSError):
                failure = error.strerror or str(error) or type(error).__name__
            else:
                failure, own = f"{type(error).__name__}: {error}", error
            if self.processes > 1:
                failure = f"{failure} (rank {self.process} on {socket.gethostname()})"
        # The first rank's text comes last, and stays.
        texts = [message.decode() for message in reversed(self.gather_bytes(failure.encode())) if message]
        met = {text.partition(" (rank ")[0]: text for text in texts}
        if own is not None:
            raise own
        if met:
            raise OSError("; ".join(met.values()))

    def on_leader(self, part: Callable[[], object]) -> None:
        """Has rank 0 do something, and waits for it; collective.

        Raises:
            OSError: on every rank, where it has failed.
        """
        self.on_every_rank(part if self.leads else _no_work)


def _no_work() -> None:
    """The part of a rank without work."""
