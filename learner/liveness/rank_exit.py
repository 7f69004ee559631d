"""The end of a rank's process, whatever the rank computes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rollmesh.learner.liveness.rank_watch import log_lost
from rollmesh.mesh.errors import RankLostError, RollmeshError

log = logging.getLogger(__name__)


def run_rank(work: Callable[[], object], *, end: Callable[[int], object] = os._exit) -> int:
    """Does the work of a rank to its end; expected failures become one message and the error's exit code.

    Args:
        work: of the rank.
        end: ends this process at once with an exit status.

    Returns:
        The process exit code.
    """
    try:
        work()
    except RankLostError as error:
        log_lost(error)
        # A thread that writes a checkpoint may wait for the lost rank, and Python would wait for that thread.
        end(error.status)
        return error.status
    except RollmeshError as error:
        log.error("%s", error, extra={"code": error.code})
        return error.exit_code
    return 0
