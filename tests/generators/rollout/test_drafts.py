"""When drafts are written, and what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.generators.engines.types import PartialResponse
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, trajectory_pb2

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
EVERY_S, EVERY_TOKENS = 5.0, 256


def sampled(count: int, version: PolicyVersion = V1) -> Trajectory:
    return Trajectory.sampled(
        np.arange(count, dtype=np.int32), np.full(count, -0.5, np.float32), VersionRuns(((count, version),))
    )


def group(name: str = "g1", drafted: Mapping[int, int] | None = None, n: int = 2) -> ActiveGroup:
    task = trajectory_pb2.PromptTask(task_id=name, n=n, prompt_ids=np.array([3, 4], "<i4").tobytes())
    drafts = [
        buffer_pb2.MemberDraft(member=member, payload=encode(sampled(count, V0)))
        for member, count in (drafted or {}).items()
    ]
    grant = buffer_pb2.GroupGrant(group_id=name, lease_id="a7", attempt=2, task=task, drafts=drafts)
    return ActiveGroup.from_grant("train", grant)


class Surroundings:
    """Engine, rollout loop, writer and clock in one.

    Attributes:
        lengths: request id -> tokens of its response so far, and the time at which it got its slot.
        asked: what `progress` was asked for.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.lengths: dict[str, tuple[int, float]] = {}
        self.owners: dict[str, tuple[ActiveGroup, int]] = {}
        self.asked: list[dict[str, int]] = []
        self.writes: list[PendingWrite] = []
        self.status = buffer_pb2.WRITE_STATUS_STORED
        self.dropped: list[ActiveGroup] = []
        self.finished_on_the_way: list[str] = []
        self.busy = asyncio.Event()
        self.drafts = DraftUploader(
            self,  # type: ignore[arg-type]  # the part of an engine that it uses
            self,
            lambda: self,
            every_s=EVERY_S,
            every_tokens=EVERY_TOKENS,
            clock=lambda: self.now,
        )

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        self.asked.append(dict(at_least))
        done: Future[list[PartialResponse]] = Future()
        found = [
            PartialResponse(name, sampled(self.lengths[name][0]), self.now - self.lengths[name][1])
            for name, wanted in at_least.items()
            if self.lengths[name][0] >= max(wanted, 1)
        ]
        done.set_result(found)
        for name in self.finished_on_the_way:
            self.owners.pop(name)
        return done

    def unfinished(self, table: str) -> dict[str, tuple[ActiveGroup, int]]:
        assert table == "train"
        return dict(self.owners)

    def drop(self, group: ActiveGroup) -> None:
        self.dropped.append(group)

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        self.writes.extend(writes)
        return [WriteResult(self.status) for _ in writes]

    async def look(self, at: float, **lengths: int) -> list[int]:
        """Takes a look `at` seconds after the start; the lengths of the drafts written."""
        self.now = 100.0 + at
        for name, count in lengths.items():
            self.lengths[name] = (count, self.lengths[name][1])
        before = len(self.writes)
        await self.drafts.write_due()
        return [len(decode(write.payload).response_ids) for write in self.writes[before:]]

    def start(self, name: str, owner: ActiveGroup, member: int = 0, *, slot_after: float = 0.0) -> None:
        self.owners[name] = (owner, member)
        self.lengths[name] = (0, 100.0 + slot_after)


async def test_seconds_or_tokens_whichever_comes_first() -> None:
    around = Surroundings()
    around.start("slow", group("g1"))
    around.start("fast", group("g2"))
    assert await around.look(0.0) == []
    assert await around.look(4.9, slow=60, fast=200) == []
    assert around.asked[-1] == {"slow": EVERY_TOKENS, "fast": EVERY_TOKENS}, "short responses are not even copied"
    assert await around.look(5.0, slow=61, fast=256) == [61, 256]
    assert await around.look(9.9, slow=110, fast=511) == []
    assert await around.look(9.95, slow=111, fast=512) == [512], "so many new tokens"
    assert await around.look(10.0, slow=112, fast=513) == [112], "so many seconds since its last draft"
    assert await around.look(20.0, slow=112, fast=514) == [514], "only those that progressed"
    assert around.drafts.written == 5


async def test_a_draft_is_a_payload_without_an_outcome() -> None:
    around = Surroundings()
    around.start("a", group(), member=1)
    await around.look(0.0)
    await around.look(6.0, a=3)
    [write] = around.writes
    assert write.head.draft
    assert (write.head.group_id, write.head.lease_id, write.head.attempt) == ("g1", "a7", 2)
    assert write.head.meta == trajectory_pb2.MemberMeta(member=1)
    found = decode(write.payload)
    assert found.response_ids.tolist() == [0, 1, 2]
    assert found.log_probs.tolist() == [-0.5] * 3
    assert found.response_mask.tolist() == [1] * 3
    assert found.versions.runs == ((3, V1),)


async def test_waiting_for_a_slot_is_not_running() -> None:
    around = Surroundings()
    around.start("late", group(), slot_after=4.0)
    await around.look(0.0)
    assert await around.look(6.0, late=9) == []
    assert await around.look(8.9, late=90) == []
    assert await around.look(9.0, late=91) == [91]


async def test_what_came_with_the_grant_is_not_drafted_again() -> None:
    around = Surroundings()
    around.start("again", group(drafted={0: 300}))
    assert await around.look(0.0, again=300) == []
    assert await around.look(7.0, again=300) == []
    assert await around.look(8.0, again=301) == [301]


async def test_what_finished_meanwhile_is_not_drafted() -> None:
    around = Surroundings()
    around.start("a", group("g1"))
    around.start("b", group("g2"))
    await around.look(0.0)
    around.finished_on_the_way = ["a"]
    assert await around.look(6.0, a=10, b=20) == [20]


async def test_a_draft_that_is_not_needed_ends_the_work_on_its_group() -> None:
    around = Surroundings()
    owner = group()
    around.start("a", owner)
    await around.look(0.0)
    around.status = buffer_pb2.WRITE_STATUS_SUPERSEDED
    await around.look(6.0, a=10)
    assert around.dropped == [owner]
    assert around.drafts.written == 0


async def test_a_response_too_long_for_a_draft_is_drafted_no_more() -> None:
    around = Surroundings()
    around.start("a", group())
    await around.look(0.0)
    around.status = buffer_pb2.WRITE_STATUS_REJECTED
    assert await around.look(6.0, a=10) == [10]
    assert await around.look(20.0, a=900) == []
    await around.drafts.write_all()
    assert len(around.writes) == 1
    assert around.dropped == []


async def test_at_the_end_everything_is_drafted() -> None:
    around = Surroundings()
    around.start("drafted", group("g1"))
    around.start("young", group("g2"))
    around.start("waits", group("g3"))
    await around.look(0.0)
    await around.look(5.0, drafted=300)
    around.lengths |= {"young": (2, 104.0)}
    await around.drafts.write_all()
    assert [w.head.group_id for w in around.writes] == ["g1", "g2"], "nothing new of the first, nothing of the third"
    around.lengths |= {"drafted": (301, 100.0)}
    await around.drafts.write_all()
    assert len(decode(around.writes[-1].payload).response_ids) == 301


async def test_no_one_is_asked_while_nothing_runs() -> None:
    around = Surroundings()
    await around.look(0.0)
    around.start("a", group())
    await around.look(1.0)
    around.owners.clear()
    await around.look(9.0)
    assert around.asked == [{"a": EVERY_TOKENS}]
