"""The foundation of all services: configuration, trajectories, versions, RPC, membership, telemetry, weights."""

import os

# A second copy, imported by its folder's name, would have registries and classes of its own.
if __name__ != "rollmesh.mesh":
    raise ImportError(f"no module named {__name__!r}: import rollmesh.mesh", name=__name__)

# Read by gRPC when it starts. Its fork support would start threads in a child between fork and exec, which abort when
# the child closes its descriptors; our children always exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
