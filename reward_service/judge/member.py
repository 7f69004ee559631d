"""The judge of a member of the mesh: it shares limits and budget with all others that score for the run.

There are no calls of its own for it: heartbeats carry each process's standing, and `List` shows those of all. A process
without a heartbeat for a member's time to live is gone for the others. By then it asks nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.protos import membership_pb2
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.judge.budget import Claim
from rollmesh.reward_service.judge.sharing import Others, Standing
from rollmesh.reward_service.judge.spent import Spent, SpentFiles

log = logging.getLogger(__name__)
# Seconds between two readings, at least. Each member reads, and each reading costs a front about 50 microseconds per
# member. With many members readings are rarer: all together take a tenth of a front's time.
_INTERVAL_S = 1.0
_READING_S = 5e-5 / 0.1


@asynccontextmanager
async def shared_judge(
    accounts: Accounts | None, agent: MembershipAgent, role: membership_pb2.Role, run: Path
) -> AsyncIterator[None]:
    """Shares limits and budget while the context lasts; the arguments are those of `SharedJudge`.

    Args:
        accounts: None: the process has no judge.
    """
    if accounts is None:
        yield
        return
    sharing = asyncio.create_task(SharedJudge(accounts, agent, role, run).run(), name="shared-judge")
    try:
        yield
    finally:
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)


class SharedJudge:
    """Keeps the shares of one process up to date.

    Args:
        accounts: of the process; it asks nothing before the first reading.
        agent: of the process, in the mesh.
        role: of all that score for the run.
        run: its folder.
    """

    def __init__(self, accounts: Accounts, agent: MembershipAgent, role: membership_pb2.Role, run: Path) -> None:
        self._accounts = accounts
        self._agent = agent
        self._role = role
        self._files = SpentFiles(run, agent.member_id)
        self._published = Standing()
        self._term = 0
        self._share = self._claim = 0.0
        # Greatest known use of each other process, whether it lives or not.
        self._spent_by: dict[str, Spent] = {}
        accounts.set_share(0.0, lambda: False, Claim(0.0))

    async def run(self) -> None:
        """Reads and publishes until it is cancelled."""
        try:
            while True:
                members = 0
                try:
                    members = await self.refresh()
                except (RollmeshError, grpc.aio.AioRpcError) as error:
                    log.warning("the judge does not know who else asks: %s", error)
                await asyncio.sleep(max(_INTERVAL_S, _READING_S * members * members))
        finally:
            self._files.write(self._spent())

    async def refresh(self) -> int:
        """Reads what all say of themselves, takes what is this process's, and publishes; the number of members."""
        presence = self._agent.presence
        if (term := presence.term) != self._term:
            # The others may have taken its parts meanwhile: they count only once they are seen again.
            self._term, self._share, self._claim = term, 0.0, 0.0
            self._published = self._published.again()
        members = await self._agent.members(self._role)
        standings = {member.member_id: Standing.of(member.gauges) for member in members}
        seen = standings.pop(self._agent.member_id, Standing())
        others = self._others(standings, await asyncio.to_thread(self._files.others))
        published = self._published
        self._share = published.share.in_force(self._share, seen.share, others.shares)
        self._claim = published.claim.in_force(self._claim, seen.claim, others.claims)
        self._publish(seen, others)
        claim = Claim(self._claim, others.elsewhere, others.processes)
        self._accounts.set_share(self._share, lambda: presence.holds(term), claim)
        await asyncio.to_thread(self._files.write, self._spent())
        return len(members)

    def _others(self, standings: Mapping[str, Standing], kept: Mapping[str, Spent]) -> Others:
        told = {name: Spent(standing.tokens, standing.cost) for name, standing in standings.items()}
        for source in (kept, told):
            for name, spent in source.items():
                self._spent_by[name] = spent.at_least(self._spent_by.get(name, Spent()))
        budget = self._accounts.budget
        used = {name: budget.share_of(spent.tokens, spent.cost) for name, spent in self._spent_by.items()}
        gone = sum(share for name, share in used.items() if name not in standings)
        return Others(list(standings.values()), [used[name] for name in standings], gone)

    def _publish(self, seen: Standing, others: Others) -> None:
        published, spent = self._published, self._spent()
        self._published = Standing(
            published.share.next(seen.share, others.wanted_share()),
            published.claim.next(seen.claim, others.wanted_claim(self._accounts.budget.used)),
            spent.tokens,
            spent.cost,
        )
        self._share = min(self._share, self._published.share.amount)
        self._claim = min(self._claim, self._published.claim.amount)
        self._agent.set_status(gauges={**self._published.gauges(), **self._accounts.gauges()})

    def _spent(self) -> Spent:
        return Spent(float(self._accounts.budget.tokens), self._accounts.budget.cost)
