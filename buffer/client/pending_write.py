"""A write that a generator hands to the client."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.protos import buffer_pb2 as pb


@dataclass(slots=True)
class PendingWrite:
    """A member's outcome or draft.

    Attributes:
        head: all but the payload; the client sets its `payload_bytes`.
        payload: as `mesh.trajectory.payload_codec` encodes it; empty where the member is not scored.
    """

    head: pb.MemberWrite
    payload: bytes = b""
