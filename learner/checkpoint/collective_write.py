"""Work of which every rank does a part: where it fails on one, it fails on all, in the same words.

Invariant: no rank waits for one that has given up, and none continues without it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from rollmesh.learner.engines.interface import Engine


def on_every_rank(engine: Engine, part: Callable[[], object]) -> None:
    """Does this rank's part and waits for the others; collective.

    Args:
        engine: knows the ranks.
        part: of this rank.

    Raises:
        OSError: on every rank, where a part has failed on any; names the first rank that met each failure.
    """
    failure = ""
    try:
        part()
    except OSError as error:
        failure = error.strerror or str(error)
        if engine.layout.processes > 1:
            failure = f"{failure} (rank {engine.layout.process} on {socket.gethostname()})"
    met = {text.partition(" (rank ")[0]: text for text in _texts(engine, failure)}
    if met:
        raise OSError("; ".join(met.values()))


def _texts(engine: Engine, failure: str) -> list[str]:
    """The failures of the ranks, the first rank's last."""
    return [message.decode() for message in reversed(engine.world.gather_bytes(failure.encode())) if message]
