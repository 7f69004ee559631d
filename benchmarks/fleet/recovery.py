"""The groups of lost generators, and the time until all are in other hands; read from Redis itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.fleet.pipes import MeasurementError
from benchmarks.fleet.servers import RUN

_PREFIX = f"{{rollmesh:{RUN}}}:train"
_LOOK_S = 0.05


def held_by(client: Any, members: Sequence[str]) -> set[bytes]:
    """Groups that these members hold."""
    with client.pipeline(transaction=False) as pipe:
        for member in members:
            pipe.zrange(f"{_PREFIX}:held:{member}", 0, -1)
        return {group for groups in pipe.execute() for group in groups}


def wait_until_elsewhere(client: Any, members: Sequence[str], groups: set[bytes], timeout_s: float) -> float:
    """Waits until none of these groups is with these members or without a holder; returns the seconds that took.

    Raises:
        MeasurementError: it takes longer than `timeout_s`.
    """
    began = time.monotonic()
    while time.monotonic() < began + timeout_s:
        waiting = set(client.zrange(f"{_PREFIX}:orphans:", 0, -1)) & groups
        if not waiting and not held_by(client, members) & groups:
            return time.monotonic() - began
        time.sleep(_LOOK_S)
    raise MeasurementError(f"some of {len(groups)} groups have no new holder after {timeout_s:.0f} s")
