"""The transports under contract; one entry each."""

from __future__ import annotations

from generators.weights.transports.grpc import Grpc
from generators.weights.transports.shm import SharedMemory
from mesh.hosts import host_id
from tests.generators.weights.transports.world import Case, default_publisher

CASES: list[Case] = [
    Case("shm", lambda: SharedMemory(host_id()), default_publisher, needs_publisher=False),
    Case("grpc", Grpc, default_publisher),
]
