"""The mesh at one moment, as its own answers have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmesh.protos import buffer_pb2, membership_pb2, weights_pb2


@dataclass(frozen=True)
class LiveMesh:
    """Answers of the mesh, and its waits in words.

    Attributes:
        table: counts of the train table; None while the buffer does not answer.
        members: the members of the mesh.
        waits: who waits for whom.
        stall: how long nothing has moved, and who holds groups; empty while the run moves.
        unscored: responses without a reward; empty without any.
        phase: present work of the learner; empty without a learner.
        turns: of devices that generators and learner share; empty without any.
        trouble: why the mesh does not answer; empty where it does.
        run_finished: the learner has reported the end of the run.
        pushes: generators' reports of weights; None where no learner has answered.
        ledgers: by table; not read at every moment, because it counts every group.
    """

    table: buffer_pb2.DescribeResponse | None = None
    members: Sequence[membership_pb2.Member] = ()
    waits: str = ""
    stall: str = ""
    unscored: str = ""
    phase: str = ""
    turns: str = ""
    trouble: str = ""
    run_finished: bool = False
    pushes: weights_pb2.PushesResponse | None = None
    ledgers: Mapping[str, buffer_pb2.LedgerResponse] = field(default_factory=dict)

    def of_role(self, role: membership_pb2.Role) -> list[membership_pb2.Member]:
        """The members of a role, by id."""
        return sorted((member for member in self.members if member.role == role), key=lambda member: member.member_id)
