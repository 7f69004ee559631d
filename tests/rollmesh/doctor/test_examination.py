"""Checks run at the same time, and whatever one does, the others are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from rollmesh.doctor.examination import Check, run_checks
from rollmesh.doctor.findings import Diagnosis, Finding, Severity, note, ok, problem, warning
from rollmesh.mesh.errors import ConfigError


def test_a_check_that_hangs_is_left_behind_and_others_are_told() -> None:
    hang = threading.Event()

    def hangs() -> list[Finding]:
        hang.wait()
        return []

    try:
        found = run_checks([Check("stuck", hangs, deadline_s=0.05), Check("quick", lambda: [ok("quick", "well")])])
    finally:
        hang.set()
    assert [(finding.check, finding.severity) for finding in found] == [
        ("stuck", Severity.NOTE),
        ("quick", Severity.OK),
    ]
    assert found[0].what == "not checked: no answer within 0.05 s"


def test_findings_before_an_error_stay_and_an_error_is_one() -> None:
    def refuses() -> Iterator[Finding]:
        yield ok("start", "one")
        raise ConfigError("a key is wrong", hint="set it right")

    def breaks() -> Iterator[Finding]:
        yield ok("odd", "one")
        raise KeyError("x")

    first, refused, second, broken = run_checks([Check("start", refuses), Check("odd", breaks)])
    assert (first.severity, second.severity) == (Severity.OK, Severity.OK)
    assert refused == problem("start", "a key is wrong", "set it right")
    assert broken.severity is Severity.NOTE
    assert "KeyError" in broken.what


def test_checks_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=600.0)

    def meets() -> list[Finding]:
        both.wait()
        return [ok("meets", "both are here")]

    found = run_checks([Check("meets", meets, deadline_s=600.0)] * 2)
    assert [finding.severity for finding in found] == [Severity.OK, Severity.OK]


def test_the_worst_comes_first_and_what_is_well_is_one_line() -> None:
    diagnosis = Diagnosis(
        "a run",
        [
            ok("a", "fine"),
            note("b", "so"),
            problem("c", "bad", "do this"),
            warning("d", "slow", "do that"),
            ok("a", "x"),
        ],
    )
    assert list(diagnosis.lines()) == [
        "problem  c: bad",
        "         -> do this",
        "warning  d: slow",
        "         -> do that",
        "note     b: so",
        "ok       a",
        "a run: 1 problem(s), 1 warning(s), 1 note(s), 2 ok(s)",
    ]
    assert "ok       a: fine" in list(diagnosis.lines(everything=True))
    assert not diagnosis.healthy
    assert diagnosis.to_json()["findings"][0]["check"] == "c"
