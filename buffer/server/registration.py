"""A front's own membership: it joins the run, sends heartbeats, and leaves.

Invariants
  * All fronts that are alive follow the rules of the first one; a front with other rules is refused, with their names.
  * A front that the others took for dead bootstraps again before it is listed again. It ends if the run follows other
    rules by then, or if its grant is over, since no member would believe it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.membership import HEARTBEATS_PER_TERM
from rollmesh.mesh.access.token_file import Expiry
from rollmesh.mesh.errors import RollmeshError, StoreError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.protos import membership_pb2 as pb

log = logging.getLogger(__name__)


class FrontRegistration:
    """A front's entry among the members, in Redis.

    Args:
        front: what the front shares.
        front_id: the front's member id.
        address: where clients reach it.
        bootstrap: writes the run's rules; raises if another front follows different ones.
        expiry: of the grant with which the front proves itself.
    """

    def __init__(
        self,
        front: FrontContext,
        *,
        front_id: str,
        address: str,
        bootstrap: Callable[[], Awaitable[None]],
        expiry: Expiry,
    ) -> None:
        self._front = front
        self._members = front.store.members
        self._bootstrap = bootstrap
        self._expiry = expiry
        self._member = pb.Member(
            member_id=front_id,
            role=pb.ROLE_BUFFER,
            address=address,
            host_id=host_id(),
            pid=os.getpid(),
            joined_unix_ms=int(time.time() * 1000),
        )
        self._generation = 0

    async def register(self) -> None:
        """Lists the front as a member."""
        joined = await self._members.join(self._member)
        self._generation = joined.generation if joined else 0

    async def keep_alive(self) -> RollmeshError:
        """Sends heartbeats until the run follows other rules or the grant is over; returns the error with the cause."""
        outage = self._front.outage
        while True:
            await asyncio.sleep(self._front.membership.member_ttl_ms / 1000 / HEARTBEATS_PER_TERM)
            try:
                if not await self._heartbeat():
                    await self._bootstrap()
                    await self.register()
                outage.job_passed("heartbeat of this front")
            except StoreError as error:
                outage.job_failed("heartbeat of this front", error)
            except RollmeshError as error:
                return error

    async def _heartbeat(self) -> bool:
        """Sends one heartbeat; returns whether the run still knows this front."""
        request = pb.HeartbeatRequest(
            member_id=self._member.member_id, generation=self._generation, gauges=self._expiry.gauges()
        )
        return (await self._members.heartbeat(request, self._front.membership.member_ttl_ms)).known

    async def unregister(self) -> None:
        """Takes the front off the list, so that no new call comes."""
        try:
            await self._members.leave(self._member.member_id, self._generation)
        except StoreError as error:
            log.warning("leaving the run: %s", error)
