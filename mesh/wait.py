"""A wait, as members of the mesh report it: the reason in words, and a cause that readers act on."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.protos import membership_pb2


@dataclass(frozen=True, slots=True)
class Wait:
    """A present wait; false where nothing waits.

    Attributes:
        reason: in words; empty where nothing waits.
        cause: unspecified where no reader acts on it.
    """

    reason: str = ""
    cause: membership_pb2.WaitCause = membership_pb2.WAIT_CAUSE_UNSPECIFIED

    def __bool__(self) -> bool:
        return bool(self.reason)


NO_WAIT = Wait()
