"""A learner of a run that is finished, on a platform that starts again whatever ends: it answers and trains nothing.

A StatefulSet of Kubernetes is such a platform: each new start would continue a finished run by some steps.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, newest_version
from rollmesh.learner.control_requests import FINISHED
from rollmesh.learner.recovery.run_identity import LEARNER_JSON
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.config import Config
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.log_format import LogSettings
from rollmesh.mesh.runtime.service import (
    Shutdown,
    add_health_and_reflection,
    advertised_address,
    run_service,
    set_serving,
    write_ready_file,
)
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)


def how_finished(folder: Path) -> str:
    """The reason with which the run's last learner has finished it; empty where it has not, or may not have.

    Args:
        folder: of the run.
    """
    try:
        last = json.loads((folder / LEARNER_JSON).read_text(encoding="utf-8"))
        policy = PolicyVersion(int(last["incarnation"]), int(last["version"]))
        reason = str(last["stop_reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    # A learner that came later has written checkpoints of its own.
    return reason if reason in FINISHED and newest_version(folder / CHECKPOINTS_NAME) == policy else ""


def run(config: Config, reason: str, *, port: int = 0, ready_file: Path | None = None) -> int:
    """Answers health checks until it is asked to end.

    Args:
        config: of the run.
        reason: with which it is finished.
        port: to bind, as the learner would.
        ready_file: written once it answers.

    Returns:
        The process exit code.
    """
    security, network = config.security, config.network

    async def serve(shutdown: Shutdown) -> int:
        check_security(security, Identity(Role.LEARNER), endpoint=False)
        server = new_server(security, Identity(Role.LEARNER))
        health = add_health_and_reflection(server, ())
        address = advertised_address(network.host, bind(server, network.host, port, security), network.advertise)
        await server.start()
        await set_serving(health, ())
        write_ready_file(ready_file, address)
        log.info("the run is finished (%s): nothing is trained, and %s answers until it is ended", reason, address)
        await shutdown.requested.wait()
        await server.stop(1.0)
        return 0

    return run_service("learner", serve, settings=LogSettings.of(config))
