"""Units of work as a worker gets them: items that are read, outcomes that are sent back."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem
from rollmesh.reward_service.workers.messages import pack_answer

# A unit's number, the deadline of its call on the monotonic clock, and its items.
Unit = tuple[int, float, Sequence[bytes]]
READ_BYTES = 1 << 18


def parse(blobs: Sequence[bytes]) -> tuple[list[RewardItem], list[Failed | None]]:
    """The items that can be read, and per item the error if it cannot."""
    items: list[RewardItem] = []
    failures: list[Failed | None] = []
    for blob in blobs:
        try:
            items.append(RewardItem.from_proto(reward_pb2.ScoreItem.FromString(blob)))
            failures.append(None)
        except PayloadError as error:
            failures.append(Failed("bad_input", str(error)))
    return items, failures


def answer_of(items: Sequence[RewardItem], failures: Sequence[Failed | None], outcomes: Sequence[Outcome]) -> bytes:
    """The answer: outcomes of the items, and failures of those that could not be read, in their order."""
    if len(items) == len(failures):
        return pack_answer(outcomes)
    scored = iter(outcomes)
    return pack_answer([failure or next(scored) for failure in failures])
