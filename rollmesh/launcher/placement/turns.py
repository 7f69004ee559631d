"""The turns on shared devices as operators see them: what the learner reports, in words, and requests to it.

Every call has a deadline. A learner that does not answer is reported as that, and hides nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from rollmesh.launcher.learner_requests import ask_learner
from rollmesh.learner.placement.swap import Phase
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import SHARES_DEVICES
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.protos import (
    generator_pb2,
    generator_pb2_grpc,
    learner_pb2,
    membership_pb2,
)

# A look at a mesh waits no longer for one service.
_DEADLINE_S = 2.0
# Steps of a swap that are the learner's own; the wait of the step before is over.
_OWN_STEPS = (Phase.ONLOADING, Phase.OFFLOADING)
_LEVELS = {
    generator_pb2.SLEEP_LEVEL_UNSPECIFIED: "awake",
    generator_pb2.SLEEP_LEVEL_FROZEN: "frozen",
    generator_pb2.SLEEP_LEVEL_WITHOUT_KV_CACHE: "asleep, without KV cache",
    generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS: "asleep, without weights",
}


async def read_turns(address: str, security: SecuritySection) -> learner_pb2.PlacementStatus | None:
    """The state of a learner's turns; None where it has its devices for itself.

    Raises:
        RollmeshError: it does not answer.
    """
    request = learner_pb2.LearnerStatusRequest()
    answer: learner_pb2.LearnerStatusResponse = await ask_learner(address, security, "Status", request, _DEADLINE_S)
    return answer.placement if answer.HasField("placement") else None


async def yield_devices(address: str, security: SecuritySection, *, hold_s: float, timeout_s: float) -> None:
    """Has the learner give its devices to the generators; returns when they have them.

    Args:
        address: of the learner.
        security: of the mesh.
        hold_s: seconds for which it takes no other turn.
        timeout_s: deadline. The request stands after it.

    Raises:
        RollmeshError: it refuses, or does not answer in time.
    """
    await ask_learner(address, security, "Yield", learner_pb2.YieldRequest(hold_ms=round(1000 * hold_s)), timeout_s)


async def resume_turns(address: str, security: SecuritySection) -> None:
    """Lets the learner take its turns again.

    Raises:
        RollmeshError: it refuses, or does not answer.
    """
    await ask_learner(address, security, "Resume", learner_pb2.ResumeTurnsRequest(), _DEADLINE_S)


async def read_sleep(members: Sequence[membership_pb2.Member], security: SecuritySection) -> dict[str, str]:
    """The sleep of each generator that shares devices, in words, by member id."""
    sharing = [member for member in members if shares_devices(member) and member.address]
    found = await asyncio.gather(*(_read_sleep(member.address, security) for member in sharing))
    return {member.member_id: level for member, level in zip(sharing, found, strict=True)}


def turns_text(status: learner_pb2.PlacementStatus, *, starting: bool = False) -> str:
    """The state of turns in one short line.

    Args:
        status: as the learner reports it.
        starting: no generator has had weights yet.
    """
    phase = "generators start," if starting and status.phase == Phase.GENERATING else status.phase
    text = f"{phase} for {status.phase_ms / 1000:.0f} s, turn {status.turns}"
    if status.taken_back:
        text += f", {status.taken_back} taken back"
    reason = awaited(status)
    return f"{text}; {reason}" if reason else text


def awaited(status: learner_pb2.PlacementStatus) -> str:
    """The reason why the present phase waits for others; empty where it does not."""
    return "" if status.phase in _OWN_STEPS else status.reason


def shares_devices(member: membership_pb2.Member) -> bool:
    """A generator that takes turns with the learner."""
    return bool(member.gauges.get(SHARES_DEVICES))


def sleep_text(levels: Mapping[str, str]) -> str:
    """All generators by their sleep, in one line."""
    by_level: dict[str, list[str]] = {}
    for name, level in sorted(levels.items()):
        by_level.setdefault(level, []).append(name)
    return "; ".join(f"{level}: {', '.join(names)}" for level, names in by_level.items())


async def _read_sleep(address: str, security: SecuritySection) -> str:
    try:
        async with open_channel(address, security) as channel:
            status: generator_pb2.GeneratorStatusResponse = await generator_pb2_grpc.GeneratorControlStub(
                channel
            ).Status(generator_pb2.GeneratorStatusRequest(), timeout=_DEADLINE_S)
    except (RollmeshError, grpc.aio.AioRpcError):
        return "does not answer"
    return _LEVELS.get(status.sleeping, "asleep")
