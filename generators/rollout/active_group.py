"""A group in progress in a generator."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from rollmesh.buffer.client.client import Lease
from rollmesh.generators.engines.types import GenerationResult, SamplingParams
from rollmesh.generators.rollout.response_source import MemberRequest
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode
from rollmesh.mesh.trajectory.seeds import member_seed
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FinishedMember:
    """A sampled response and the Unix time in nanoseconds at which it was complete."""

    member: int
    result: GenerationResult
    finished_unix_ns: int


@dataclass(slots=True, eq=False)
class ActiveGroup:
    """A granted group, and the progress of its members.

    Attributes:
        table: `train` or `eval`.
        grant: as received.
        prompt_ids: token ids of the prompt.
        images: encoded, of the prompt.
        pinned: the one version that may answer (evaluation); None for training.
        begun_ns: Unix time at which its members were given to the engine; 0 before.
        prefixes: member -> the tokens that an earlier holder had of it; the response continues after them.
        generating: member -> request id, given to the engine.
        finished: sampled, not submitted to scoring yet.
        answered: a member has a response.
        undelivered: submitted members without a stored outcome.
        incomplete: members are missing that are not sampled here any more; it is released once the others are stored.
        prompt_recorded: the experts of the prompt's tokens are stored, or on their way, with a member.
        dropped: the group is not ours any more; results that still arrive for it are thrown away.
    """

    table: str
    grant: buffer_pb2.GroupGrant
    prompt_ids: list[int]
    images: tuple[bytes, ...]
    pinned: PolicyVersion | None
    begun_ns: int = 0
    prefixes: dict[int, Trajectory] = field(default_factory=dict)
    generating: dict[int, str] = field(default_factory=dict)
    finished: list[FinishedMember] = field(default_factory=list)
    answered: bool = False
    undelivered: int = 0
    incomplete: bool = False
    prompt_recorded: bool = False
    dropped: bool = False

    @classmethod
    def from_grant(cls, table: str, grant: buffer_pb2.GroupGrant) -> ActiveGroup:
        task = grant.task
        pinned = PolicyVersion.from_proto(task.pinned) if task.HasField("pinned") else None
        prompt_ids = np.frombuffer(task.prompt_ids, dtype="<i4").tolist()
        # A pinned group is answered by one version alone.
        prefixes = _prefixes(grant) if pinned is None else {}
        return cls(table, grant, prompt_ids, tuple(task.images), pinned, prefixes=prefixes)

    @property
    def group_id(self) -> str:
        return self.grant.group_id

    @property
    def lease(self) -> buffer_pb2.LeaseRef:
        return buffer_pb2.LeaseRef(group_id=self.grant.group_id, lease_id=self.grant.lease_id)

    @property
    def key(self) -> Lease:
        """Group id and lease id."""
        return Lease.of(self.grant)

    @property
    def is_done(self) -> bool:
        """True where nothing is left to do for it here."""
        return not self.generating and not self.finished and self.undelivered == 0

    def missing_members(self) -> list[int]:
        """Members that are not stored yet."""
        done = set(self.grant.members_done)
        return [member for member in range(self.grant.task.n) if member not in done]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the model sees it."""
        return self.grant.task.seen.tokens or len(self.prompt_ids)

    def draft_tokens(self, member: int) -> int:
        """Tokens of the member that came with the grant."""
        return len(self.prefixes.get(member, ()))

    def request(self, member: int, request_id: str) -> MemberRequest:
        """The request for one member: the whole response, continued after the tokens of an earlier holder."""
        return MemberRequest(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            sampling=sampling_of(self.grant.task.sampling, seed=self._seed(member), greedy=self._is_greedy(member)),
            pinned=self.pinned is not None,
            prefix=self.prefixes.get(member),
            alone=self.grant.attempt > 1,
            images=self.images,
            seen=self.grant.task.seen.digest,
            task=self.grant.task,
            member=member,
        )

    def _seed(self, member: int) -> int:
        return member_seed(self.grant.task.sampling.seed, self.grant.parent_group_id, self.grant.attempt, member)

    def _is_greedy(self, member: int) -> bool:
        task = self.grant.task
        return bool(member >= task.n - task.greedy)


def _prefixes(grant: buffer_pb2.GroupGrant) -> dict[int, Trajectory]:
    """Drafts by member; one that cannot be read is left out."""
    drafts = {}
    for draft in grant.drafts:
        if draft.member in grant.members_done or draft.member >= grant.task.n:
            continue
        try:
            drafts[draft.member] = decode(draft.payload)
        except PayloadError as error:
            log.warning("the draft of member %d of group %s is left out: %s", draft.member, grant.group_id, error)
    return drafts


def sampling_of(params: trajectory_pb2.SamplingParams, *, seed: int, greedy: bool = False) -> SamplingParams:
    """Sampling parameters of one response.

    Args:
        params: of the task.
        seed: of the response; 0 leaves the choice to the engine.
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
        seed=seed,
    )
