"""The name by which holders and fronts refer to a lease."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from rollmesh.protos import buffer_pb2 as pb

# The learner holds leases under this name, whichever member it is.
LEARNER = "learner"


class _NamesLease(Protocol):
    """Any message or record with the two ids: a grant, a leased group, a reference, a refusal."""

    @property
    def group_id(self) -> str: ...
    @property
    def lease_id(self) -> str: ...


class Lease(NamedTuple):
    """The right to one group. The same holder may get the group again, under another `lease_id`."""

    group_id: str
    lease_id: str

    @classmethod
    def of(cls, named: _NamesLease) -> Lease:
        """The lease that a message or record names."""
        return cls(named.group_id, named.lease_id)

    def to_proto(self) -> pb.LeaseRef:
        """The reference that messages carry."""
        return pb.LeaseRef(group_id=self.group_id, lease_id=self.lease_id)


def leases_of(named: Iterable[_NamesLease]) -> list[Lease]:
    """The leases that messages or records name."""
    return [Lease(each.group_id, each.lease_id) for each in named]
