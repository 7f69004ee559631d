"""Runs checks at the same time, each within a deadline.

Invariants: every check ends in at least one finding, whatever it raises. A check that hangs, as on a dead network
disk, is reported after its deadline and left alone: its thread ends with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollmesh.doctor.findings import Finding, not_checked, problem
from rollmesh.mesh.errors import RollmeshError

log = logging.getLogger(__name__)
_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: as findings have it.
        examine: gathers facts and judges them. A `RollmeshError` that it raises becomes a problem.
        deadline_s: seconds for all of it.
    """

    name: str
    examine: Callable[[], Iterable[Finding]]
    deadline_s: float = _DEADLINE_S


@dataclass(slots=True)
class _Answer:
    """The findings of a check that runs in a thread."""

    findings: list[Finding] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in their order.

    Args:
        checks: run at the same time, in threads.
    """
    began = time.monotonic()
    answers = [_start(check) for check in checks]
    findings: list[Finding] = []
    for check, answer in zip(checks, answers, strict=True):
        if answer.done.wait(max(0.0, began + check.deadline_s - time.monotonic())):
            findings += answer.findings
        else:
            findings.append(not_checked(check.name, f"no answer within {check.deadline_s:g} s"))
    return findings


def _start(check: Check) -> _Answer:
    answer = _Answer()

    def run() -> None:
        answer.findings = _examine(check)
        answer.done.set()

    threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    return answer


def _examine(check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        # One by one: those before an error stay.
        for finding in check.examine():
            found.append(finding)  # noqa: PERF402
    except RollmeshError as error:
        found.append(problem(check.name, error.message, error.hint))
    except Exception as error:
        # One check that breaks must not cost the findings of all others.
        log.debug("the check %s has failed", check.name, exc_info=True)
        found.append(not_checked(check.name, f"{type(error).__name__}: {error}"))
    return found
