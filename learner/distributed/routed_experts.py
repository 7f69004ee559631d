"""The experts that generators have recorded, for the sequences of a rank's share of a plan.

Missing or damaged ones are left out: those tokens are computed with the experts that the learner's router chooses.
Metrics say how many (`router_replayed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.routing import readable
from rollmesh.protos import trajectory_pb2

# Arrays on their way at once.
_AT_ONCE = 16
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedExperts:
    """A place from which recorded experts are fetched.

    Attributes:
        group_id, member: whose side data they are.
        entry: of the side data, serialized.
    """

    group_id: str
    member: int
    entry: bytes


class ExpertSource(Protocol):
    """Gives recorded experts."""

    def get(self, wanted: Collection[RecordedExperts]) -> Mapping[RecordedExperts, object]:
        """The ones of `wanted` that are there: arrays, as they came."""
        ...


class FetchedExperts:
    """Experts fetched from the buffer's side data by the rank that trains with them.

    Args:
        bridge: the event loop of this rank.
        client: of the buffer.
        timeout_s: deadline of a batch.
    """

    def __init__(self, bridge: AsyncBridge, client: BufferClient, *, timeout_s: float) -> None:
        self._bridge = bridge
        self._client = client
        self._timeout_s = timeout_s

    def get(self, wanted: Collection[RecordedExperts]) -> Mapping[RecordedExperts, object]:
        """The ones of `wanted` that are there.

        Raises:
            UnreachableError: the buffer stayed away.
        """
        return self._bridge.call(self._get(wanted), self._timeout_s) if wanted else {}

    async def _get(self, wanted: Collection[RecordedExperts]) -> Mapping[RecordedExperts, object]:
        found: dict[RecordedExperts, object] = {}
        free = asyncio.Semaphore(_AT_ONCE)

        async def fetch(each: RecordedExperts) -> None:
            entry = trajectory_pb2.SideData.FromString(each.entry)
            try:
                async with free:
                    found[each] = await self._client.fetch_side(TRAIN, each.group_id, each.member, entry)
            except (DataError, PayloadError) as error:
                log.warning("routed experts are left out: %s", error, extra={"group": each.group_id})

        await run_together(*map(fetch, wanted))
        return found


def add_experts(
    sequences: Mapping[int, TrainSequence], plan: TrainPlan, source: ExpertSource
) -> dict[int, TrainSequence]:
    """The sequences with the experts that are recorded of them; a prompt's are fetched once.

    Args:
        sequences: of this rank, by their index in the plan.
        plan: of the batch.
        source: of the experts.

    Raises:
        UnreachableError: the buffer stayed away.
    """
    places = {index: (_of_prompt(plan, index), _of_response(plan, index)) for index in sequences}
    found = source.get({place for both in places.values() for place in both if place is not None})
    opened: dict[tuple[RecordedExperts | None, int], NDArray[np.int16] | None] = {}

    def experts(place: RecordedExperts | None, tokens: int) -> NDArray[np.int16] | None:
        # Members of a group share their prompt's array.
        if (place, tokens) not in opened:
            opened[place, tokens] = None if place is None else readable(found.get(place), tokens)
        return opened[place, tokens]

    return {
        index: replace(
            sequence,
            prompt_experts=experts(places[index][0], len(sequence.prompt_ids)),
            response_experts=experts(places[index][1], len(sequence.response_ids) - 1),
        )
        for index, sequence in sequences.items()
    }


def _of_response(plan: TrainPlan, index: int) -> RecordedExperts | None:
    member = plan.members[index]
    return RecordedExperts(member.group_id, member.member, member.experts) if member.experts else None


def _of_prompt(plan: TrainPlan, index: int) -> RecordedExperts | None:
    member = plan.members[index]
    prompt = plan.prompts[member.prompt]
    return RecordedExperts(member.group_id, prompt.experts_of, prompt.experts) if prompt.experts else None
