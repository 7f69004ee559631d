"""Findings about a reward server, and the report of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]

SCHEMA = 1
"""Version of the JSON report; raised whenever a field changes its meaning or is gone."""
OK, NOT_USABLE, UNREACHABLE = 0, 1, 5
"""Exit codes. A wrong option is 2, and a sample file that cannot be used 3, as with all commands."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation.

    Attributes:
        severity: an `error` breaks runs, a `warning` deserves a look, a `note` is for information.
        probe: the probe that led to it: a stable id, as `identity.same-id`.
        message: the observation.
        remedy: the change that would end it.
    """

    severity: Severity
    probe: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.severity:<8}{self.probe}: {self.message}{f'; {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings at one address.

    Attributes:
        server: what Info said; empty without Info.
        outcomes: of the sample items: scored, unscorable, error.
        figures: measurements, in the units that their names end with.
        skipped: probe -> the reason why it was left out.
        reachable: false if nothing answered there.
    """

    address: str
    findings: Sequence[Finding]
    server: str = ""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    reachable: bool = True

    def usable(self, *, strict: bool = False) -> bool:
        """True if runs can use the server; if `strict`, only without warnings too."""
        fatal = ("error", "warning") if strict else ("error",)
        return self.reachable and not any(finding.severity in fatal for finding in self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """The exit code of the command."""
        if not self.reachable:
            return UNREACHABLE
        return OK if self.usable(strict=strict) else NOT_USABLE

    def lines(self, *, strict: bool = False) -> list[str]:
        """The report for a person."""
        head = f"{self.address}{f' ({self.server})' if self.server else ''}"
        if self.outcomes:
            head += ": " + ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        body = [head, *map(str, self.findings)]
        if rates := self.figures.get("items_per_s"):
            body.append("items/s by items in a call: " + ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items()))
        body += [f"skipped {probe}: {reason}" for probe, reason in self.skipped.items()]
        verdict = "usable: the answers keep the contract"
        if not self.usable(strict=strict):
            verdict = "not usable: see the findings above" if self.reachable else "not usable: it was not reached"
        return [*body, verdict]

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        """The report for a program."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "strict": strict,
            "usable": self.usable(strict=strict),
            "exit_code": self.exit_code(strict=strict),
        }
