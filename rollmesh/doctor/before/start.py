"""The start of a run, tried: interpreters run, and the learner accepts model, data, algorithm and former folder."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.doctor.findings import Finding, note, ok
from rollmesh.launcher.interpreters import check_interpreters
from rollmesh.launcher.preflight.checks import check_code
from rollmesh.launcher.run_secrets import with_own_secrets
from rollmesh.launcher.services import interpreters_of
from rollmesh.mesh.config.models import Config

INTERPRETERS, START = "interpreters", "start"


def check_pythons(config: Config) -> Iterator[Finding]:
    """The interpreters of the services run, and have what they need."""
    found = list(interpreters_of(config))
    check_interpreters(found)
    others = [f"{one.field} {one.path}" for one in found if one.path is not None]
    yield ok(INTERPRETERS, ", ".join(others) or "all services run in this environment")


def check_start(config: Config) -> Iterator[Finding]:
    """All that `rollmesh run` tries before it starts services; a refusal ends this check."""
    yield from (note(START, notice) for notice in check_code(with_own_secrets(config)).notices)
    yield ok(START, "the learner accepts algorithm, model, data and the run's folder")
