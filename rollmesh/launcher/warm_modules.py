"""The modules that the services of a run share: they are loaded once, in the server from which services are forked."""

from __future__ import annotations

SHARED = (
    "rollmesh.buffer.server.process",
    "rollmesh.reward_service.server.service",
    "rollmesh.learner.service",
    "rollmesh.learner.engines.fsdp2.engine",
    "rollmesh.learner.role_service.service",
    "rollmesh.learner.standalone.service",
    "rollmesh.generators.service",
    "rollmesh.generators.engines.hf.engine",
    # The launcher itself, where another process forks it.
    "rollmesh.launcher.local",
    "rollmesh.launcher.preflight.checks",
)
"""None of them starts a thread, calls a device, or makes an object of gRPC."""
