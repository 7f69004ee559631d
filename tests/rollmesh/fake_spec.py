"""Services of `fake_service.py`, as the launcher starts them. Apart from fixtures, which load more than a launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollmesh.launcher.service_process import ServiceSpec, ready_file
from rollmesh.mesh.runtime.threads import thread_environment
from tests.repository import REPOSITORY

FAKE = Path(__file__).with_name("fake_service.py")
LOADED = ("grpc", "grpc_health.v1.health", "rollmesh.mesh.runtime.die_with_parent", "rollmesh.protos.learner_pb2_grpc")
"""Modules that it loads."""


def fake_spec(
    folder: Path, name: str, *arguments: str, completes_run: bool = False, drain_s: float = 240.0
) -> ServiceSpec:
    """A service of `fake_service.py`."""

    def command(_restart: bool) -> list[str]:
        module = [sys.executable, "-P", "-m", f"tests.rollmesh.{FAKE.stem}"]
        return [*module, str(ready_file(folder, name)), "--name", name, *arguments]

    environment = {**thread_environment(1), "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    return ServiceSpec(name, command, environment, start_deadline_s=240.0, drain_s=drain_s, completes_run=completes_run)
