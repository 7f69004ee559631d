"""The files that a process may have open, and the share of each kind of connection.

Invariant: however many connections come, of all kinds together, an eighth of the files is left for anything else.
Without that, connections take the last ones, and then whatever else the process opens fails.
"""

from __future__ import annotations

import resource
from typing import NamedTuple


class ConnectionLimits(NamedTuple):
    """The number of connections of each kind that a process takes."""

    # Calls of the mesh: 1,000 generators with a few connections each, and others.
    calls: int
    # Requests of a generator's own agents over HTTP.
    agents: int
    # Requests of others over HTTP.
    requests: int


MOST = ConnectionLimits(calls=8192, agents=2048, requests=1024)


def limits_of(files: int) -> ConnectionLimits:
    """The connections of a process that may have `files` files open."""
    within = ConnectionLimits(files // 2, files // 4, files // 8)
    return ConnectionLimits(*map(min, MOST, within))


def connections_here() -> ConnectionLimits:
    """The connections of this process, after it has raised its limit of files as far as it may do so itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * MOST.calls
    if soft == resource.RLIM_INFINITY:
        return MOST
    if soft < limit:
        soft = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return limits_of(soft)
