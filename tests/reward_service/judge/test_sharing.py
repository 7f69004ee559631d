"""Limits and budget of several processes: together they never have more than the whole, whatever becomes of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.mesh.membership import Presence
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.client.client import LocalScorer
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.judge.budget import Claim, Usage
from rollmesh.reward_service.judge.errors import BusyError, SpentError
from rollmesh.reward_service.judge.judge import Judge
from rollmesh.reward_service.judge.limits import Limits
from rollmesh.reward_service.judge.member import SharedJudge
from rollmesh.reward_service.judge.slots import Slots
from rollmesh.reward_service.judge.spent import Spent, SpentFiles, read_spent
from rollmesh.reward_service.scoring.engine import ScoringEngine

ROLE = membership_pb2.ROLE_REWARD
SECTION = JudgeSection(budget_tokens=100_000, requests_per_minute=600, concurrency=8)
FOREVER_S = 1e9


class Mesh:
    """Gauges by member, as heartbeats have brought them."""

    def __init__(self) -> None:
        self.members: dict[str, Mapping[str, float]] = {}


class Process:
    """One that scores; its heartbeats come when the test says so."""

    def __init__(self, mesh: Mesh, name: str, run: Path) -> None:
        self._mesh = mesh
        self.member_id = name
        self.presence = Presence()
        self._gauges: dict[str, float] = {}
        self.accounts = Accounts(SECTION)
        self.sharing = SharedJudge(self.accounts, self, ROLE, run)  # type: ignore[arg-type]  # what it needs of an agent

    async def members(self, _role: Any) -> list[membership_pb2.Member]:
        return [membership_pb2.Member(member_id=name, gauges=gauges) for name, gauges in self._mesh.members.items()]

    def set_status(self, *, gauges: Mapping[str, float]) -> None:
        self._gauges.update(gauges)

    def heartbeat(self) -> None:
        self._mesh.members[self.member_id] = dict(self._gauges)
        self.presence.renew(time.monotonic(), FOREVER_S)

    def cut_off(self) -> None:
        """The mesh does not hear of it for its time to live, and forgets it."""
        self.presence.end()
        self._mesh.members.pop(self.member_id, None)

    async def settle(self, rounds: int = 4) -> None:
        for _ in range(rounds):
            await self.sharing.refresh()
            self.heartbeat()

    def spend(self, tokens: int) -> bool:
        try:
            self.accounts.reserve(Usage(tokens, 0))
        except (BusyError, SpentError):
            return False
        return True


async def settle(*processes: Process) -> None:
    for _ in range(6):
        for process in processes:
            await process.settle(1)


async def test_shares_follow_those_who_come_and_go(tmp_path: Path) -> None:
    mesh = Mesh()
    one, two = Process(mesh, "one", tmp_path), Process(mesh, "two", tmp_path)
    assert one.accounts.share == 0.0, "nothing is asked before the mesh has answered"
    assert not one.spend(1)
    await one.settle()
    assert one.accounts.share == 1.0
    await two.settle()
    assert two.accounts.share == 0.0, "the first one has not heard of it"
    await settle(one, two)
    assert (one.accounts.share, two.accounts.share) == (0.5, 0.5)
    assert [process.accounts.most_in_progress() for process in (one, two)] == [4, 4]
    del mesh.members["one"]
    await two.settle()
    assert two.accounts.share == 1.0


async def test_a_generator_that_scores_itself_shares_its_judge(tmp_path: Path) -> None:
    agent = Process(Mesh(), "generator", tmp_path)
    none = LocalScorer(ScoringEngine(["exact_match"]))
    await none.share_judge(agent, ROLE, tmp_path)  # type: ignore[arg-type]  # what it needs of an agent
    await none.close()
    judge = Judge(JudgeSection(base_url="http://127.0.0.1:9/v1", model="m"), call_timeout_s=10.0)
    scorer = LocalScorer(ScoringEngine([judge]))
    sharing = asyncio.create_task(scorer.share_judge(agent, ROLE, tmp_path))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while judge.accounts.share < 1.0:
            await asyncio.sleep(0.05)
            agent.heartbeat()
    sharing.cancel()
    await asyncio.gather(sharing, return_exceptions=True)
    await scorer.close()


async def test_who_is_cut_off_asks_nothing_and_comes_back_with_what_others_leave(tmp_path: Path) -> None:
    mesh = Mesh()
    one, two = Process(mesh, "one", tmp_path), Process(mesh, "two", tmp_path)
    await settle(one, two)
    one.cut_off()
    assert one.accounts.share == 0.0
    assert not one.spend(1)
    await settle(two)
    assert two.accounts.share == 1.0
    # Its first heartbeat repeats what it had before.
    one.heartbeat()
    assert one.accounts.share == 0.0
    await one.settle(1)
    assert one.accounts.share == 0.0
    await settle(two, one)
    assert (one.accounts.share, two.accounts.share) == (0.5, 0.5)


@pytest.mark.parametrize("seed", range(12))
async def test_together_they_never_have_more_than_the_whole(seed: int, tmp_path: Path) -> None:
    draw, mesh = random.Random(seed), Mesh()
    living: list[Process] = []
    ended: list[Process] = []
    for number in range(150):
        action = draw.random()
        if not living or (action < 0.06 and len(living) < 5):
            living.append(Process(mesh, f"process{number}", tmp_path))
        process = draw.choice(living)
        if action < 0.1 and len(living) > 1:
            # The mesh forgets it later.
            await process.sharing.refresh()
            living.remove(process)
            ended.append(process)
        elif action < 0.14 and ended:
            mesh.members.pop(draw.choice(ended).member_id, None)
        elif action < 0.17:
            process.cut_off()
        elif action < 0.5:
            await process.sharing.refresh()
        elif action < 0.8:
            process.heartbeat()
        else:
            process.spend(draw.randrange(1, 4000))
        assert sum(one.accounts.share for one in living) <= 1.0 + 1e-9
        assert sum(one.accounts.budget.tokens for one in [*living, *ended]) <= 100_000
    for one in ended:
        mesh.members.pop(one.member_id, None)
    await settle(*living)
    assert [one.accounts.share for one in living] == pytest.approx([1 / len(living)] * len(living))


async def test_a_budget_outlives_its_process_and_is_spent_to_its_end(tmp_path: Path) -> None:
    mesh = Mesh()
    first = Process(mesh, "first", tmp_path)
    await first.settle()
    assert first.spend(70_000)
    await first.settle()
    mesh.members.clear()
    assert read_spent(tmp_path) == {"first": Spent(70_000.0, 0.0)}

    one, two = Process(mesh, "one", tmp_path), Process(mesh, "two", tmp_path)
    await settle(one, two)
    assert not one.spend(31_000)
    spent = 0
    for _ in range(60):
        spent += 1000 * one.spend(1000)
        await settle(one, two)
    assert 28_000 <= spent <= 30_000
    with pytest.raises(SpentError, match=r"9\d000 of 100000 tokens"):
        two.accounts.reserve(Usage(3000, 0))


def test_the_rest_of_others_is_no_spent_budget() -> None:
    accounts = Accounts(SECTION)
    accounts.set_share(0.5, lambda: True, Claim(0.1, elsewhere=0.0, processes=2))
    with pytest.raises(BusyError, match="claimed"):
        accounts.reserve(Usage(20_000, 0))


def test_files_that_cannot_be_read_or_written_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "broken.json").write_text('{"tokens": ')
    assert SpentFiles(tmp_path, "me").others() == {}
    (tmp_path / "file").touch()
    SpentFiles(tmp_path / "absent", "me").write(Spent(1.0, 1.0))
    assert not (tmp_path / "absent").exists()


# ---------------------------------------------------------------------------------------------- changing limits


def test_a_request_that_waits_follows_a_rate_that_changes() -> None:
    limits = Limits(60.0, None, now=0.0)  # one a second, ten at once
    for _ in range(10):
        limits.take(0, 0.0)
    turn = limits.take(0, 0.0)
    assert limits.left_s(turn, 0.0) == 1.0
    limits.set_share(0.5, 0.5)
    assert limits.left_s(turn, 0.5) == 1.0
    limits.set_share(0.0, 0.5)
    assert limits.left_s(turn, 0.5) == float("inf")
    limits.set_share(1.0, 100.0)
    assert limits.left_s(turn, 100.0) == 0.5, "nothing was saved up meanwhile"


async def test_places_are_given_in_order_and_their_number_changes() -> None:
    most = 1
    slots = Slots(lambda: most)
    await slots.acquire()
    got: list[int] = []

    async def enter(number: int) -> None:
        await slots.acquire()
        got.append(number)

    waiting = [asyncio.create_task(enter(number)) for number in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    most = 2
    slots.release()
    await asyncio.gather(*waiting[1:3])
    assert got == [1, 2]
    slots.release()
    await waiting[3]
    assert got == [1, 2, 3]
