"""Modules that the server of forked processes loads once for all services of a run.

Invariant: none of them starts a thread, calls a device, or makes an object of gRPC.
"""

from __future__ import annotations

PRELOADED_MODULES = (
    "rollmesh.buffer.server.process",
    "rollmesh.reward_service.server.service",
    "rollmesh.learner.service",
    "rollmesh.learner.engines.fsdp2.create",
    "rollmesh.learner.model_files.shared_parts",
    "rollmesh.learner.role_service.service",
    "rollmesh.learner.standalone.service",
    "rollmesh.generators.service",
    "rollmesh.generators.engines.hf.engine",
    # The launcher itself, where another process forks it.
    "rollmesh.launcher.local",
    "rollmesh.launcher.preflight.checks",
    "rollmesh.cli.preloaded",
)
