"""How holders and fronts name a lease."""

from __future__ import annotations

from rollmesh.protos import buffer_pb2 as pb

# The learner holds leases under this name, whichever member it is.
LEARNER = "learner"
# (group id, lease id)
Lease = tuple[str, str]


def leases_of(inventory: pb.Inventory) -> list[Lease]:
    """The leases that an inventory names."""
    return [(lease.group_id, lease.lease_id) for lease in inventory.leases]
