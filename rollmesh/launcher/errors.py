"""Errors of the launcher."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from rollmesh.mesh.errors import RollmeshError, StuckError
from rollmesh.mesh.liveness.freeze_detector import Frozen
from rollmesh.report.restarts import Reason


class ServiceExitError(RollmeshError):
    """A service ended when it should not have.

    Attributes:
        status: its exit status (negative: minus the signal).
        log_tail: its last log lines, where they add to the message.
    """

    code = "service_exit"

    def __init__(self, service: str, exit_code: int, explanation: str, log_tail: Sequence[str], *, hint: str) -> None:
        super().__init__(f"{service}: {explanation}", hint=hint)
        self.service = service
        self.status = exit_code
        self.log_tail = tuple(log_tail)

    @property
    def reason(self) -> Reason:
        """The reason under which the restart counts."""
        return "hung" if self.status == StuckError.exit_code else "exit"


class FrozenServiceError(ServiceExitError):
    """A service lived and did not answer, and was killed."""

    code = "service_frozen"

    def __init__(self, service: str, process: str, verdict: Frozen, log_tail: Sequence[str], *, log: Path) -> None:
        which = "" if process == service else f"{process} "
        hint = f"see {log}; resources.frozen_after_s says when silence is a failure"
        super().__init__(service, -signal.SIGKILL, f"{which}frozen ({verdict}), killed", log_tail, hint=hint)

    @property
    def reason(self) -> Reason:
        return "frozen"
