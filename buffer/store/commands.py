"""Runs scripts over Redis, and keeps the snapshots of the tables that their answers carry. Also caches prompts.

Decides nothing: `buffer.policy` proposes, Lua disposes.

Payloads and prompts are plain keys that never pass through Lua. A small payload is SET together with the script that
makes it count (`buffer.store.payloads` says the rest). The end of its group names it in the `trash`, from which any
front removes it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.store.drafts import Drafts
from rollmesh.buffer.store.errors import checked_answer, lost_state_error
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.member_registry import MemberRegistry
from rollmesh.buffer.store.payloads import Payloads
from rollmesh.buffer.store.prompt_images import PromptImages
from rollmesh.buffer.store.side_files import SideFileStore
from rollmesh.buffer.store.statistics import StatisticsStore
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.tables import TABLES
from rollmesh.mesh.trajectory.image_files import IMAGES_NAME

log = logging.getLogger(__name__)
# Scripts with answers that must not be used if they come from a state that has gone back.
_HANDS_OUT_DATA = frozenset({"attach", "sample", "claim", "nack", "commit", "reassert"})
_PROMPTS_CACHED = 4096
# Larger ones are read from Redis each time.
_CACHED_PROMPT_BYTES = 64 << 10
# Groups that one call of a script works on at most.
MAX_GROUPS_PER_CALL = 256


class CommandRunner:
    """Runs the scripts of one run.

    Args:
        access: Redis.
        run_name: names the keys.
        side: where large data of members lies.

    Attributes:
        redis: for commands on what belongs to no table, and for reading.
        snapshots: of each table, as last seen.
    """

    def __init__(self, access: RedisAccess, run_name: str, side: SideFileStore) -> None:
        self.redis = access
        self.keys = Keys(run_name)
        self.payloads = Payloads(access, self.keys)
        self.side = side
        self.images = PromptImages(side.folder / IMAGES_NAME)
        self.drafts = Drafts(access, self.keys)
        self.members = MemberRegistry(access, self.keys)
        self.statistics = StatisticsStore(access, self.keys)
        self.snapshots: dict[str, TableSnapshot] = {table: TableSnapshot() for table in TABLES}
        self._listeners: list[Callable[[str], None]] = []
        # By table and name; a name has the digest, so none can be wrong, whatever Redis loses.
        self._prompts: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(table)` whenever a newer snapshot of a table is known."""
        self._listeners.append(listener)

    def _update_snapshot(self, table: str, values: Sequence[int], *, trust: bool = False) -> TableSnapshot:
        snapshot = TableSnapshot.from_reply(values)
        if snapshot.rev > self.snapshots[table].rev or (trust and snapshot != self.snapshots[table]):
            self.snapshots[table] = snapshot
            self._notify(table)
        return snapshot

    def _notify(self, table: str) -> None:
        for listener in self._listeners:
            listener(table)

    async def _run(self, name: str, table: str, *arguments: str | bytes | int) -> list[Any]:
        before = self.snapshots[table].rev
        answer = await self.redis.run_script(name, table, *arguments)
        snapshot = self._update_snapshot(table, answer[1])
        if snapshot.rev < before:
            await self._mark_suspect(table, before)
            if name in _HANDS_OUT_DATA:
                raise lost_state_error()
        return checked_answer(answer)

    async def _mark_suspect(self, table: str, before: int) -> None:
        """Marks lost state: the revision went back, and every front and learner must know of it."""
        self.payloads.cache.clear()
        answer = await self.redis.run_script("mark_suspect", table, before)
        after = self._update_snapshot(table, answer[1], trust=True).rev
        log.error("Redis went back from revision %d to %d", before, after, extra={"table": table})

    async def refresh(self, table: str) -> TableSnapshot:
        """Reads the snapshot again; trusts it even if its `rev` went back, and makes that known."""
        before = self.snapshots[table].rev
        answer = await self.redis.run_script("read_table", table)
        if self._update_snapshot(table, answer[1], trust=True).rev < before:
            await self._mark_suspect(table, before)
        return self.snapshots[table]

    async def prompts(self, table: str, names: Sequence[str]) -> dict[str, bytes]:
        """Serialized PromptTasks by name; missing ones are left out."""
        found = {name: self._prompts[table, name] for name in names if (table, name) in self._prompts}
        missing = list(set(names) - found.keys())
        if missing:
            blobs = await self.redis.mget([self.keys.prompt(table, name) for name in missing])
            for name, blob in zip(missing, blobs, strict=True):
                if blob is not None:
                    found[name] = blob
                    self._cache_prompt(table, name, blob)
        return found

    def _cache_prompt(self, table: str, name: str, blob: bytes) -> None:
        if len(blob) > _CACHED_PROMPT_BYTES:
            return
        self._prompts[table, name] = blob
        if len(self._prompts) > _PROMPTS_CACHED:
            self._prompts.popitem(last=False)


def lease_arguments(leases: Sequence[Lease]) -> list[str]:
    """Leases as scripts take them: group id, lease id, group id, ..."""
    return [part for lease in leases for part in lease]
