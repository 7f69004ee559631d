"""Drafts: the tokens of unfinished members so far, kept in the buffer for the next holder to continue.

Invariants:

- Only members of training groups are drafted. One is due `every_s` seconds (with a new token) or `every_tokens` tokens
  after the start of its response or its last draft. A shorter response costs nothing.
- Members are checked `_CHECKS` times per `every_s`, one check after the other: a slow buffer makes drafts rarer.
- A member's draft never follows its outcome.

Drafts are not compressed: most are replaced before they are read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.generators.engines.types import PartialResponse
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.generators.rollout.encoding import member_write
from rollmesh.generators.rollout.response_source import ResponseSource
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.payload_codec import encode
from rollmesh.protos import buffer_pb2, trajectory_pb2

log = logging.getLogger(__name__)
_CHECKS = 8


class DraftWriter(Protocol):
    """The part of the buffer's client that stores drafts."""

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        """Stores drafts; one result each, in order.

        Raises:
            UnreachableError: the buffer stayed away for too long.
        """
        ...


class UnfinishedMembers(Protocol):
    """The part of the rollout loop that knows the unfinished members."""

    @property
    def busy(self) -> asyncio.Event:
        """Set while there are groups in progress."""
        ...

    def unfinished(self, table: str) -> dict[str, tuple[ActiveGroup, int]]:
        """Request id -> (group, member) of the unfinished members."""
        ...

    def drop(self, group: ActiveGroup) -> None:
        """Stops working on a group that has another holder, or has ended."""
        ...


@dataclass(slots=True)
class DraftState:
    """The part of one response that is in the buffer, and its time.

    Attributes:
        tokens: in the buffer.
        since: monotonic time, in seconds, of the last draft. Before the first: of the start of the response as far as
            it is known (not before it was first seen).
        refused: the buffer takes no draft of it any more: it has grown too long.
    """

    tokens: int
    since: float
    refused: bool = False

    def due_length(self, now: float, every_s: float, every_tokens: int) -> int:
        """The length from which on the response is to be drafted."""
        return self.tokens + (1 if now - self.since >= every_s else every_tokens)

    def set_started(self, at: float) -> None:
        """Records the start of the response, of which there is no draft by this generator yet."""
        self.since = max(self.since, at)


class DraftUploader:
    """Writes drafts while there is work.

    Args:
        source: gives the tokens.
        members: the unfinished ones.
        writer: of the training table.
        every_s, every_tokens: `rollout.draft_every_s` and `rollout.draft_every_tokens`.
        clock: monotonic seconds.

    Attributes:
        written: drafts stored.
    """

    def __init__(
        self,
        source: ResponseSource,
        members: UnfinishedMembers,
        writer: Callable[[], DraftWriter],
        *,
        every_s: float,
        every_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._members = members
        self._writer = writer
        self._every_s = every_s
        self._every_tokens = every_tokens
        self._clock = clock
        self._states: dict[str, DraftState] = {}
        self._one_at_a_time = asyncio.Lock()
        self.written = 0

    async def run(self) -> None:
        """Writes due drafts until cancelled.

        Raises:
            RollmeshError: the engine has failed, or the buffer stayed away for too long.
        """
        while True:
            await self._members.busy.wait()
            await asyncio.sleep(self._every_s / _CHECKS)
            await self.write_due()

    async def write_due(self) -> None:
        """Drafts the members that are due."""
        async with self._one_at_a_time:
            now = self._clock()
            self._refresh_states(now)
            parts = await self._progress(lambda state: state.due_length(now, self._every_s, self._every_tokens))
            await self._write(now, [part for part in parts if self._is_due(now, part)])

    async def write_all(self) -> None:
        """Drafts all members that have tokens beyond their last draft."""
        async with self._one_at_a_time:
            now = self._clock()
            self._refresh_states(now)
            await self._write(now, await self._progress(lambda state: state.tokens + 1))

    def _refresh_states(self, now: float) -> None:
        """Forgets finished members and adds new ones."""
        unfinished = self._members.unfinished(TRAIN)
        self._states = {
            name: self._states.get(name) or DraftState(group.draft_tokens(member), now)
            for name, (group, member) in unfinished.items()
        }

    async def _progress(self, length_of: Callable[[DraftState], int]) -> list[PartialResponse]:
        at_least = {name: length_of(state) for name, state in self._states.items() if not state.refused}
        return await asyncio.wrap_future(self._source.progress(at_least)) if at_least else []

    def _is_due(self, now: float, part: PartialResponse) -> bool:
        state = self._states[part.request_id]
        # It may have waited for a slot since it was first seen.
        state.set_started(now - part.running_s)
        return len(part.sampled) >= state.due_length(now, self._every_s, self._every_tokens)

    async def _write(self, now: float, parts: Sequence[PartialResponse]) -> None:
        unfinished = self._members.unfinished(TRAIN)
        parts = [part for part in parts if part.request_id in unfinished]
        if not parts:
            return
        writes = []
        for part in parts:
            group, member = unfinished[part.request_id]
            writes.append(
                member_write(group, trajectory_pb2.MemberMeta(member=member), encode(part.sampled), draft=True)
            )
        results = await self._writer().write(writes)
        unfinished = self._members.unfinished(TRAIN)
        for part, result in zip(parts, results, strict=True):
            refused = result.status == buffer_pb2.WRITE_STATUS_REJECTED
            self._states[part.request_id] = DraftState(len(part.sampled), now, refused)
            self.written += result.status == buffer_pb2.WRITE_STATUS_STORED
            if part.request_id not in unfinished:
                continue
            group, member = unfinished[part.request_id]
            if refused:
                extra = {"group": group.group_id, "member": member}
                reason = f"{result.field}: {result.message}"
                log.warning("member %d of group %s is not drafted: %s", member, group.group_id, reason, extra=extra)
            elif result.status == buffer_pb2.WRITE_STATUS_SUPERSEDED:
                self._members.drop(group)
