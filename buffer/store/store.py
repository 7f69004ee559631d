"""The buffer's store: all commands over Redis with typed answers, and a front's housekeeping."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.protocol.leases import LEARNER, Lease
from rollmesh.buffer.store.commands import MAX_GROUPS_PER_CALL, lease_arguments
from rollmesh.buffer.store.errors import different_rules_error
from rollmesh.buffer.store.generator_commands import GeneratorCommands
from rollmesh.buffer.store.learner_commands import LearnerCommands
from rollmesh.buffer.store.payloads import PayloadRef, parse_payload_refs
from rollmesh.buffer.store.records import EndedGroup
from rollmesh.buffer.store.unowned_values import sweep_unowned_values
from rollmesh.mesh.tables import TABLES


class Store(GeneratorCommands, LearnerCommands):
    """The commands of one run: one class, written in three modules by who calls them."""

    async def bootstrap(
        self, rules: dict[str, TableRules], config_json: str, *, front_id: str, member_ttl_ms: int, sole: bool
    ) -> str:
        """Loads the scripts and writes rules and configuration; repeated at every start of a front.

        Args:
            front_id: the front's member id.
            member_ttl_ms: silence after which another front counts as dead.
            sole: no other front can be alive, whatever the list of fronts says.

        Returns:
            The configuration that members receive: that of the first front, where others are alive.

        Raises:
            ConfigError: another front is alive and follows other rules.
        """
        await self.redis.load()
        fields = json.dumps({table: table_rules.to_fields() for table, table_rules in rules.items()})
        answer = await self.redis.run_script(
            "bootstrap", "", front_id, member_ttl_ms, int(sole), config_json, fields, secrets.token_hex(16)
        )
        if answer[0] == b"differs":
            raise different_rules_error(answer[1].decode(), answer[2])
        for table in TABLES:
            await self.refresh(table)
        in_force: bytes = answer[1]
        return in_force.decode()

    async def member_metas(self, table: str, members: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Serialized MemberMetas; None where the group has ended or the member is not stored."""
        return await self.redis.batch(
            [("HGET", self.keys.table(table, f"g:{group_id}"), member) for group_id, member in members]
        )

    async def alive(self, table: str, group_ids: Sequence[str]) -> list[bool]:
        """Says for each group if it is still live."""
        commands = [("EXISTS", self.keys.table(table, f"g:{group_id}")) for group_id in group_ids]
        return [bool(found) for found in await self.redis.batch(commands)]

    async def payload_refs(self, table: str, group_ids: Sequence[str]) -> dict[str, tuple[PayloadRef, ...]]:
        """References to the payloads of live groups; none for groups that are not live."""
        answer = await self._run("payload_refs", table, *group_ids)
        return {group_id: parse_payload_refs(text) for group_id, text in zip(group_ids, answer[2], strict=True)}

    async def evict(self, table: str) -> list[EndedGroup]:
        """Ends all groups that cannot train within the bound any more; returns them."""
        evicted: list[EndedGroup] = []
        left = 1
        while left:
            answer = await self._run("evict", table, MAX_GROUPS_PER_CALL)
            evicted += [EndedGroup(gid.decode(), n, age, why.decode()) for gid, n, age, why in answer[2]]
            left = answer[3]
        return evicted

    async def expire(self, table: str, member_ttl_ms: int) -> tuple[int, int, bool]:
        """Ends leases that ran out, in portions: (generating, leased, whether Redis had restarted)."""
        generating = leased = 0
        restarted, left = False, True
        while left:
            answer = await self._run("expire", table, MAX_GROUPS_PER_CALL, member_ttl_ms)
            generating, leased = generating + answer[2], leased + answer[3]
            restarted, left = restarted or bool(answer[4]), bool(answer[5])
        return generating, leased, restarted

    async def end_unnamed_leases(
        self, table: str, holder: str, fence: int, token: str, named: Iterable[Lease]
    ) -> tuple[int, list[Lease]]:
        """Ends all leases of a holder but those that it has named, in portions.

        Args:
            fence: the generator's connection generation, or the learner's incarnation.
            token: of the holder's stream.
            named: the leases that it may have, and no others.

        Returns:
            How many leases were ended, and those named that are dead.

        Raises:
            RollmeshError: the holder, or its stream, is not the present one.
        """
        (held,) = await self.redis.batch([("ZRANGE", self.keys.held_groups(table, holder), 0, -1)])
        by_group: defaultdict[str, list[Lease]] = defaultdict(list)
        for lease in named:
            by_group[lease.group_id].append(lease)
        groups = [by_group.pop(group_id, [Lease(group_id, "")]) for group_id in map(bytes.decode, held)]
        if holder != LEARNER:
            # It may have lost them for a while, and no one else has got them yet.
            groups += by_group.values()
            by_group.clear()
        dead = [lease for leases in by_group.values() for lease in leases]
        ended = 0
        for start in range(0, len(groups), MAX_GROUPS_PER_CALL):
            portion = [lease for leases in groups[start : start + MAX_GROUPS_PER_CALL] for lease in leases]
            answer = await self._run("end_unnamed_leases", table, holder, fence, token, *lease_arguments(portion))
            ended += answer[2]
            dead += [Lease(group_id.decode(), lease_id.decode()) for group_id, lease_id in answer[3]]
        return ended, dead

    async def remove_ended_values(self, table: str) -> int:
        """Removes payloads and prompts of ended groups; returns the number of groups."""
        trash = self.keys.table(table, "trash")
        collected = 0
        while True:
            (entries,) = await self.redis.batch([("SRANDMEMBER", trash, MAX_GROUPS_PER_CALL)])
            if not entries:
                return collected
            keys = []
            for entry in entries:
                group_id, prompt, payloads, drafts = entry.decode().split("|")
                keys += self.payloads.keys_of_groups(table, [(group_id, payloads)])
                keys += self.drafts.keys_of(table, group_id, drafts)
                if prompt:
                    keys.append(self.keys.prompt(table, prompt))
            groups = (entry.decode().partition("|")[0] for entry in entries)
            await self.side.remove(table, groups, partial(self.alive, table))
            # In this order, so that no payload outlives the entry that names it.
            await self.redis.batch_then([("UNLINK", *keys)] if keys else [], [("SREM", trash, *entries)])
            collected += len(entries)

    async def sweep_unowned(self, table: str, *, age_s: float) -> int:
        """Removes stored values that no group owns; returns how many, 0 while another front's sweep is recent.

        Args:
            age_s: for which a value has had no owner, and least time between two sweeps.
        """
        lock = ("SET", self.keys.table(table, "sweeping"), 1, "NX", "PX", int(age_s * 1000))
        if (await self.redis.batch([lock]))[0] is None:
            return 0
        return await sweep_unowned_values(self.redis, self.keys, table, age_s=age_s)

    @asynccontextmanager
    async def subscribe_hints(self) -> AsyncIterator[AsyncIterator[tuple[str, int]]]:
        """Subscribes to the hints of all fronts: (table, revision) of each change."""
        async with self.redis.subscribed(self.keys.wake) as subscription:
            yield (_read_hint(message["data"]) async for message in subscription.listen())

    async def fail_groups(self, table: str, leases: Sequence[Lease], reason: str = "payload_lost") -> None:
        """Ends groups that no holder can use: as a rule, their prompt or payload is gone."""
        await self._run("fail_groups", table, reason, *lease_arguments(leases))

    async def redrive(self, table: str, group_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Queues prompts of failed groups again: (how many, groups without a kept prompt)."""
        answer = await self._run("redrive", table, *group_ids)
        return int(answer[2]), [gid.decode() for gid in answer[3]]

    async def holders(self, table: str) -> tuple[list[list[Any]], str]:
        """The holders of groups, as the script returns them, and the learner's member id (empty without one)."""
        answer = await self._run("holders", table)
        return answer[2], answer[3].decode()

    async def ledger(self, table: str, failed_limit: int) -> list[Any]:
        """Counters, recount, reasons and failed groups, as the script returns them."""
        return await self._run("ledger", table, failed_limit)


def _read_hint(data: bytes) -> tuple[str, int]:
    table, rev = data.decode().split()
    return table, int(rev)
