"""The foundation of all services: configuration, trajectories, versions, RPC, membership, telemetry, weights."""

import os

# Read by gRPC when it starts. Its fork support would start threads in a child between fork and exec, which abort when
# the child closes its descriptors; our children always exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
