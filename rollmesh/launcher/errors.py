"""Errors of the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from mesh.errors import RollmeshError


class ServiceExitError(RollmeshError):
    """A service ended when it should not have; `status` is its exit status (negative: minus the signal)."""

    code = "service_exit"

    def __init__(self, service: str, exit_code: int, explanation: str, log_tail: Sequence[str], *, hint: str) -> None:
        super().__init__(f"{service}: {explanation}", hint=hint)
        self.service = service
        self.status = exit_code
        self.log_tail = tuple(log_tail)


class RunBusyError(RollmeshError):
    """Another launcher works in the same run folder."""

    code = "run_busy"
    exit_code = 42
