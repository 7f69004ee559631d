"""A group in a generator's hands."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from generators.engines.base import GenerationRequest, GenerationResult, SamplingParams
from mesh.errors import PayloadError
from mesh.versions import PolicyVersion
from protos import buffer_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True, eq=False)
class FinishedMember:
    """A sampled response and the Unix time in nanoseconds at which it was complete."""

    member: int
    result: GenerationResult
    finished_unix_ns: int


@dataclass(slots=True, eq=False)
class HeldGroup:
    """What a grant gave, and how far its members are.

    Attributes:
        table: `train` or `eval`.
        grant: as received.
        prompt_ids: token ids of the prompt.
        pinned: the one version that may answer (evaluation); None for training.
        generating: member -> request id, given to the engine.
        finished: sampled, not handed on to scoring yet.
        undelivered: members handed on whose outcome is not stored yet.
        dropped: the group is not ours any more; whatever still arrives for it is thrown away.
    """

    table: str
    grant: buffer_pb2.GroupGrant
    prompt_ids: list[int]
    pinned: PolicyVersion | None
    generating: dict[int, str] = field(default_factory=dict)
    finished: list[FinishedMember] = field(default_factory=list)
    undelivered: int = 0
    dropped: bool = False

    @classmethod
    def from_grant(cls, table: str, grant: buffer_pb2.GroupGrant) -> HeldGroup:
        task = grant.task
        pinned = PolicyVersion.from_proto(task.pinned) if task.HasField("pinned") else None
        return cls(table, grant, np.frombuffer(task.prompt_ids, dtype="<i4").tolist(), pinned)

    @property
    def group_id(self) -> str:
        return self.grant.group_id

    @property
    def lease(self) -> buffer_pb2.LeaseRef:
        return buffer_pb2.LeaseRef(group_id=self.grant.group_id, lease_id=self.grant.lease_id)

    @property
    def over(self) -> bool:
        """Nothing is left to do for it here."""
        return not self.generating and not self.finished and self.undelivered == 0

    def missing_members(self) -> list[int]:
        """Members that nobody has stored yet."""
        done = set(self.grant.members_done)
        return [member for member in range(self.grant.task.n) if member not in done]

    def request(self, member: int, request_id: str) -> GenerationRequest:
        """The engine's request for one member."""
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            sampling=sampling_of(self.grant.task.sampling, member, greedy=self._is_greedy(member)),
            pinned=self.pinned is not None,
        )

    def _is_greedy(self, member: int) -> bool:
        task = self.grant.task
        return bool(member >= task.n - task.greedy)


def sampling_of(params: trajectory_pb2.SamplingParams, member: int = 0, *, greedy: bool = False) -> SamplingParams:
    """Sampling parameters of one member; the members of a seeded group draw differently, and alike in each attempt.

    Args:
        params: of the task.
        member: index in the group.
        greedy: always the most likely token; how others draw does not matter.

    Raises:
        PayloadError: no token budget.
    """
    if params.max_tokens < 1:
        raise PayloadError("sampling.max_tokens", "must be at least 1")
    return SamplingParams(
        temperature=0.0 if greedy else params.temperature,
        top_p=1.0 if greedy else params.top_p or 1.0,
        top_k=0 if greedy else params.top_k,
        max_tokens=params.max_tokens,
        stop=tuple(params.stop),
        seed=(params.seed * 0x9E3779B1 + member) % (1 << 63) or 1 if params.seed else 0,
    )
