"""Keeps a scorer's endpoints equal to the reward services in the mesh."""

from __future__ import annotations

import asyncio
import logging

from mesh.errors import RollmeshError
from mesh.membership import MembershipAgent
from protos import membership_pb2
from reward_service.interface import RewardScorer

log = logging.getLogger(__name__)
_CALM_S = 5.0
_URGENT_S = 0.5


async def follow_members(agent: MembershipAgent, scorer: RewardScorer) -> None:
    """Runs until cancelled: looks the reward services up every few seconds, more often while none answers.

    An empty or failed look-up keeps the endpoints as they are: a service that lives may still be reached while the
    mesh is away.
    """
    known: tuple[str, ...] = ()
    while True:
        try:
            members = await agent.members(membership_pb2.ROLE_REWARD)
            found = tuple(sorted(member.address for member in members if member.address))
            if found and found != known:
                log.info("reward services: %s", ", ".join(found))
                scorer.set_endpoints(found)
                known = found
        except RollmeshError as error:
            log.warning("cannot look reward services up: %s", error)
        await asyncio.sleep(_URGENT_S if scorer.waiting_reason() else _CALM_S)
