"""Findings of the doctor, and how they are shown.

Invariant: a finding that is worse than a note says in its remedy what to do: a key and a value, or a command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Evidence = Mapping[str, float | int | str | bool | None]


class Severity(StrEnum):
    """The weight of a finding, the worst last."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        severity: `ok`: as it should be. `note`: to be known, also why a check could not be made. `warning`: the run
            works, and loses time, data or safety. `problem`: it fails, or is wrong.
        check: name of the check.
        what: the observation, with its numbers.
        remedy: what to do; empty where nothing has to be done.
        evidence: its numbers, for programs.
    """

    severity: Severity
    check: str
    what: str
    remedy: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one subject.

    Attributes:
        subject: a configuration, a run folder or a mesh, in words.
        findings: in the order of the checks.
    """

    subject: str
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """True without a problem; warnings are allowed."""
        return not any(finding.severity is Severity.PROBLEM for finding in self.findings)

    def ranked(self) -> list[Finding]:
        """The findings, the worst first; equal ones in the order of the checks."""
        order = list(Severity)
        return sorted(self.findings, key=lambda finding: -order.index(finding.severity))

    def lines(self, *, everything: bool = False) -> Iterator[str]:
        """The diagnosis for a terminal.

        Args:
            everything: also what is as it should be, one line each; else such checks are only named.
        """
        for finding in self.ranked():
            if finding.severity is Severity.OK and not everything:
                continue
            yield f"{finding.severity:<8} {finding.check}: {finding.what}"
            if finding.remedy:
                yield f"         -> {finding.remedy}"
        counts = Counter(finding.severity for finding in self.findings)
        if counts[Severity.OK] and not everything:
            passed = dict.fromkeys(finding.check for finding in self.findings if finding.severity is Severity.OK)
            yield f"ok       {', '.join(passed)}"
        found = ", ".join(f"{counts[severity]} {severity}(s)" for severity in reversed(Severity) if counts[severity])
        yield f"{self.subject}: {found or 'nothing was checked'}"

    def to_json(self) -> dict[str, Any]:
        """The diagnosis for programs."""
        return {
            "subject": self.subject,
            "healthy": self.healthy,
            "findings": [{**asdict(finding), "evidence": dict(finding.evidence)} for finding in self.ranked()],
        }


def ok(check: str, what: str, **evidence: float | int | str | bool | None) -> Finding:
    """A finding that nothing is wrong."""
    return Finding(Severity.OK, check, what, evidence=evidence)


def note(check: str, what: str, remedy: str = "", **evidence: float | int | str | bool | None) -> Finding:
    """A finding for information."""
    return Finding(Severity.NOTE, check, what, remedy, evidence)


def not_checked(check: str, why: str, remedy: str = "") -> Finding:
    """A check that could not be made, and why."""
    return Finding(Severity.NOTE, check, f"not checked: {why}", remedy)


def warning(check: str, what: str, remedy: str, **evidence: float | int | str | bool | None) -> Finding:
    """A finding that costs time, data or safety."""
    return Finding(Severity.WARNING, check, what, remedy, evidence)


def problem(check: str, what: str, remedy: str, **evidence: float | int | str | bool | None) -> Finding:
    """A finding with which a run fails, or is wrong."""
    return Finding(Severity.PROBLEM, check, what, remedy, evidence)
