"""The table of faults in the documentation: what the tests plant is what users read."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from rollmesh.doctor.findings import Finding, Severity
from tests.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "doctor.md"
_ROW = re.compile(r"^\| `([\w-]+)` \|.*\| `([\w ]+)`, (note|warning|problem) \| `(.+)` \|$", re.MULTILINE)


class Documented(NamedTuple):
    """A row.

    Attributes:
        fault: its id.
        check, severity: of the finding.
        remedy: words that it has.
    """

    fault: str
    check: str
    severity: Severity
    remedy: str


@cache
def documented() -> dict[str, Documented]:
    """All rows by the id of the fault."""
    rows = (Documented(match[1], match[2], Severity(match[3]), match[4]) for match in _ROW.finditer(PAGE.read_text()))
    return {row.fault: row for row in rows}


def is_found(row: Documented, findings: list[Finding]) -> bool:
    """True where a finding is the documented one, with its remedy."""
    return any(
        finding.check == row.check and finding.severity is row.severity and row.remedy in finding.remedy
        for finding in findings
    )
