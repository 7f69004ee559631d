"""Every fault that is planted before a run is found, and its remedy named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

import pytest

from rollmesh.doctor.before import checks, inputs, start
from rollmesh.doctor.before.checks import diagnose_configuration
from rollmesh.doctor.examination import Check, run_checks
from rollmesh.doctor.findings import Finding, Severity
from rollmesh.mesh.config.models import Config
from tests.rollmesh.doctor.documented import documented, is_found
from tests.rollmesh.doctor.faults_before import FAULTS, Ground, wrong_redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with wrong_redis(tmp_path_factory.mktemp("redis")) as path:
        yield path


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that a busy machine makes slow is not given up: it would say nothing."""

    def patiently(checks: Sequence[Check]) -> list[Finding]:
        return run_checks([replace(check, deadline_s=600.0) for check in checks])

    monkeypatch.setattr("rollmesh.doctor.before.checks.run_checks", patiently)


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis: Path) -> Iterator[Ground]:
    found = Ground(tmp_path, monkeypatch, redis)
    yield found
    for opened in found.open:
        opened.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(fault: str, ground: Ground) -> None:
    row = documented()[fault]
    FAULTS[fault](ground)
    findings = list(diagnose_configuration(ground.config(), "cfg.yaml", [row.check]).findings)
    assert is_found(row, findings), findings


def test_without_a_fault_nothing_is_wrong(ground: Ground) -> None:
    diagnosis = diagnose_configuration(ground.config(), "cfg.yaml")
    worse = [finding for finding in diagnosis.findings if finding.severity in (Severity.WARNING, Severity.PROBLEM)]
    assert worse == []
    assert diagnosis.healthy


@pytest.mark.parametrize("examine", [inputs.check_models, start.check_start])
def test_checks_that_load_libraries_wait_for_one_another(
    examine: Callable[[Config], Iterator[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that import the same thing at the same time may see half of it."""
    lock = MagicMock()
    monkeypatch.setattr(checks, "IMPORTING", lock)
    (entry,) = [entry for entry in checks._CHECKS if entry.examine == examine]
    # A configuration without any section: the check ends at the first one that it needs.
    with pytest.raises(AttributeError):
        list(checks._run(entry, cast(Config, object())))
    lock.__enter__.assert_called_once()
