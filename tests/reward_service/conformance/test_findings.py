"""Findings decide about a server, and their report is for people and programs."""

from __future__ import annotations

import json

import pytest

from rollmesh.reward_service.conformance.findings import Finding, Report, Severity


@pytest.mark.parametrize(
    ("severities", "usable", "strictly"),
    [((), True, True), (("note",), True, True), (("note", "warning"), True, False), (("error",), False, False)],
)
def test_errors_decide_and_if_strict_warnings(severities: tuple[Severity, ...], usable: bool, strictly: bool) -> None:
    report = Report("a", [Finding(severity, "p.q", "seen", "do this") for severity in severities])
    assert (report.usable(), report.usable(strict=True)) == (usable, strictly)
    assert (report.exit_code(), report.exit_code(strict=True)) == (int(not usable), int(not strictly))
    lines = report.lines(strict=True)
    assert lines[-1].startswith("usable" if strictly else "not usable")
    assert len(lines) == 2 + len(severities)
    assert all(line.endswith("p.q: seen; do this") for line in lines[1:-1])


def test_the_report_of_a_program() -> None:
    report = Report("a", [Finding("warning", "p", "m", "r")], "s 1", {"scored": 8}, {"call_s": 0.1}, {"q": "why"})
    assert json.loads(json.dumps(report.as_json(strict=True))) == {
        "schema": 1,
        "address": "a",
        "findings": [{"severity": "warning", "probe": "p", "message": "m", "remedy": "r"}],
        "server": "s 1",
        "outcomes": {"scored": 8},
        "figures": {"call_s": 0.1},
        "skipped": {"q": "why"},
        "reachable": True,
        "strict": True,
        "usable": False,
        "exit_code": 1,
    }


def test_a_server_that_was_not_reached() -> None:
    report = Report("a", [], reachable=False)
    assert report.exit_code() == 5
    assert report.lines()[-1] == "not usable: it was not reached"
