"""All checks before a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

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


class _Entry(NamedTuple):
    """A check, and the names that its findings have; the first one is its own."""

    names: tuple[str, ...]
    examine: Callable[[Config], Iterator[Finding]]
    deadline_s: float


_CHECKS = (
    _Entry((start.INTERPRETERS,), start.check_pythons, _LOADING_S),
    _Entry((versions.CHECK,), versions.check_versions, 60.0),
    _Entry((inputs.MODEL,), inputs.check_models, _LOADING_S),
    _Entry((inputs.DATA,), inputs.check_data, 60.0),
    _Entry((inputs.HUB,), inputs.check_hub, 10.0),
    _Entry((rewards.CHECK,), rewards.check_rewards, 120.0),
    _Entry((rewards.CHECK,), rewards.check_endpoints, 20.0),
    _Entry((rewards.CHECK,), rewards.check_isolation, 60.0),
    _Entry((devices.CHECK,), devices.check_devices, _LOADING_S),
    _Entry((space.MEMORY, space.SHM, space.DISK), space.check_space, _LOADING_S),
    _Entry((host.CHECK,), host.check_host, 10.0),
    _Entry((ports.CHECK,), ports.check_ports, 10.0),
    _Entry((addresses.ADDRESSES,), addresses.check_addresses, 20.0),
    _Entry((addresses.PROXIES,), addresses.check_proxies, 10.0),
    _Entry((redis_server.CHECK, redis_server.CLOCK), redis_server.check_redis, 30.0),
    _Entry((certificates.SECRETS,), certificates.check_secrets, 10.0),
    _Entry((certificates.CERTIFICATES,), certificates.check_certificates, 10.0),
    _Entry((start.START,), start.check_start, _LOADING_S),
)
NAMES = tuple(dict.fromkeys(name for entry in _CHECKS for name in entry.names))
"""Names of the checks, in their order."""

IMPORTING = threading.Lock()
"""Two threads that import torch and transformers at the same time may see half of them."""
_HEAVY = (inputs.check_models, space.check_space, start.check_start)


def _run(entry: _Entry, config: Config) -> Iterator[Finding]:
    with IMPORTING if entry.examine in _HEAVY else nullcontext():
        yield from entry.examine(config)


def diagnose_configuration(config: Config, subject: str, only: Sequence[str] = ()) -> Diagnosis:
    """Examines this machine for a run; nothing is started but for a trial.

    Args:
        config: of the run.
        subject: it, in words.
        only: names of the checks to make; empty: all.
    """
    chosen = [entry for entry in _CHECKS if not only or set(only) & set(entry.names)]
    found = run_checks([Check(entry.names[0], partial(_run, entry, config), entry.deadline_s) for entry in chosen])
    return Diagnosis(subject, without_repetitions([one for one in found if not only or one.check in only]))


def without_repetitions(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without what another check has said already; the trial of a start comes upon the same mistakes."""
    kept: list[Finding] = []
    for finding in findings:
        if finding.severity is Severity.OK or not any(_same(finding, other) for other in kept):
            kept.append(finding)
    return kept


def _same(finding: Finding, other: Finding) -> bool:
    return finding.severity is other.severity and (finding.what in other.what or other.what in finding.what)
