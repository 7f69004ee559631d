"""All checks before a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rollmesh.doctor.before import (
    addresses,
    certificates,
    devices,
    host,
    inputs,
    ports,
    redis_server,
    rewards,
    space,
    start,
    versions,
)
from rollmesh.doctor.examination import Check, run_checks
from rollmesh.doctor.findings import Diagnosis, Finding, Severity
from rollmesh.mesh.config.models import Config

# Processes that load torch, on a machine that is busy.
_LOADING_S = 180.0
_CHECKS: Sequence[tuple[str, Callable[[Config], Iterator[Finding]], float]] = (
    (start.INTERPRETERS, start.check_pythons, _LOADING_S),
    (versions.CHECK, versions.check_versions, 60.0),
    (inputs.MODEL, inputs.check_models, 60.0),
    (inputs.DATA, inputs.check_data, 60.0),
    (inputs.HUB, inputs.check_hub, 10.0),
    (rewards.CHECK, rewards.check_rewards, 120.0),
    (rewards.CHECK, rewards.check_endpoints, 20.0),
    (devices.CHECK, devices.check_devices, _LOADING_S),
    (space.MEMORY, space.check_space, _LOADING_S),
    (host.CHECK, host.check_host, 10.0),
    (ports.CHECK, ports.check_ports, 10.0),
    (addresses.ADDRESSES, addresses.check_addresses, 20.0),
    (addresses.PROXIES, addresses.check_proxies, 10.0),
    (redis_server.CHECK, redis_server.check_redis, 30.0),
    (certificates.SECRETS, certificates.check_secrets, 10.0),
    (certificates.CERTIFICATES, certificates.check_certificates, 10.0),
    (start.START, start.check_start, _LOADING_S),
)
NAMES = tuple(dict.fromkeys(name for name, _, _ in _CHECKS))
"""Names of the checks, in their order."""


# Two threads that import torch and transformers at the same time may see half of them.
_IMPORTING = threading.Lock()
_HEAVY = (space.MEMORY, start.START)


def _alone(examine: Callable[[Config], Iterator[Finding]], config: Config) -> list[Finding]:
    with _IMPORTING:
        return list(examine(config))


def diagnose_configuration(config: Config, subject: str, only: Sequence[str] = ()) -> Diagnosis:
    """Examines this machine for a run; nothing is started but for a trial.

    Args:
        config: of the run.
        subject: it, in words.
        only: names of the checks to make; empty: all.
    """
    chosen = [(name, examine, deadline_s) for name, examine, deadline_s in _CHECKS if not only or name in only]
    checks = [
        Check(name, partial(_alone, examine, config) if name in _HEAVY else partial(examine, config), deadline_s)
        for name, examine, deadline_s in chosen
    ]
    return Diagnosis(subject, without_repetitions(run_checks(checks)))


def without_repetitions(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without what another check has said already; the trial of a start comes upon the same mistakes."""
    kept: list[Finding] = []
    for finding in findings:
        if finding.severity is Severity.OK or not any(_same(finding, other) for other in kept):
            kept.append(finding)
    return kept


def _same(finding: Finding, other: Finding) -> bool:
    return finding.severity is other.severity and (finding.what in other.what or other.what in finding.what)
