"""The generators of a mesh as a whole, as their heartbeats have it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rollmesh.protos import membership_pb2

# The greatest count that messages carry.
_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GeneratorFleet:
    """The generators that are alive, as of their last heartbeats.

    Attributes:
        alive: how many there are.
        serving: of those, with weights in service.
        loading: of those, still without an engine: they load or compile the model.
        tokens: sampled for groups by all of them since they started.
        reason: why one of them waits or fails; empty where none does.
    """

    alive: int = 0
    serving: int = 0
    loading: int = 0
    tokens: int = 0
    reason: str = ""


def fleet_of(members: Iterable[membership_pb2.Member]) -> GeneratorFleet:
    """The generators among the members. One reports gauges as soon as it has an engine.

    An impossible gauge counts as far as it can: what one member says of itself must not end a front.
    """
    generators = [member for member in members if member.role == membership_pb2.ROLE_GENERATOR]
    return GeneratorFleet(
        alive=len(generators),
        serving=sum(member.serving.incarnation > 0 for member in generators),
        loading=sum("tokens_generated" not in member.gauges for member in generators),
        tokens=min(_MOST, sum(_count(member.gauges.get("tokens_for_groups", 0.0)) for member in generators)),
        reason=next((member.waiting_reason for member in generators if member.waiting_reason), ""),
    )


def _count(gauge: float) -> int:
    return int(min(max(0.0, gauge), _MOST)) if math.isfinite(gauge) else 0
