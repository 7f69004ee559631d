"""The buffer's store: the verbs over Redis with typed answers. Decides nothing: `buffer.policy` proposes, Lua disposes.

Payloads and prompts are plain keys that never pass through Lua. A small payload is SET together with the verb that
makes it count (`buffer.payloads` says the rest); the end of its group names it in the `trash`, from which any front
removes it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgpack

from buffer.drafts import DraftPlace, Drafts
from buffer.keys import Keys
from buffer.payloads import Payloads, Place, SetValue, places, set_whole
from buffer.policy.order import Candidate, GroupFacts
from buffer.policy.rules import TABLES, TableRules
from buffer.records import Grant, Leased, Outlook, Sealed, Write, Written, facts_of, grant_of, leased_of
from buffer.redis_access import RedisAccess
from buffer.refusals import checked, fenced, lost_state, other_rules
from buffer.side_store import SideStore
from buffer.view import TableView
from mesh.versions import PolicyVersion
from protos import trajectory_pb2 as trajectory

log = logging.getLogger(__name__)
_PORTION = 256
# Verbs whose answer must not be used where it comes from a state that has gone back.
_GIVING = frozenset({"attach", "sample", "claim", "nack", "commit", "reassert"})
_PROMPTS_CACHED = 4096
# What writes of one lease share.
_LEASE = attrgetter("group_id", "lease_id", "attempt", "ranges")
# By the character with which the verb answers; from `_SUPERSEDED` on the value is of no use.
_SUPERSEDED = 3
_WRITTEN = {
    ord("0"): Written(1, sealed=True),
    **{ord(str(status)): Written(status, sealed=False) for status in (1, 2, _SUPERSEDED, 4)},
}


class Store:
    """The verbs of one run.

    Args:
        access: Redis.
        run_name: names the keys.
        side: where large data of members lies.
    """

    def __init__(self, access: RedisAccess, run_name: str, side: SideStore) -> None:
        self._redis = access
        self.keys = Keys(run_name)
        self.payloads = Payloads(access, self.keys)
        self.side = side
        self.drafts = Drafts(access, self.keys)
        self.views: dict[str, TableView] = {table: TableView() for table in TABLES}
        self.writing = 0
        self.sealed: dict[str, Sealed] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._prompts: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(table)` whenever newer figures of a table are known."""
        self._listeners.append(listener)

    async def bootstrap(
        self, rules: dict[str, TableRules], config_json: str, *, front_id: str, member_ttl_ms: int, sole: bool
    ) -> str:
        """Loads the verbs and writes rules and configuration; repeated at every start of a front.

        Args:
            front_id: the front's member id.
            member_ttl_ms: silence after which another front counts as dead.
            sole: no other front can be alive, whatever the list of fronts says.

        Returns:
            The configuration that members are told: that of the front which began, where others are alive.

        Raises:
            ConfigError: another front is alive and goes by other rules.
        """
        await self._redis.load()
        alone = True
        for table, table_rules in rules.items():
            fields = [part for pair in table_rules.to_fields().items() for part in pair]
            answer = await self._redis.verb("bootstrap", table, front_id, member_ttl_ms, int(sole), *fields)
            if answer[0] == b"differs":
                raise other_rules(table, answer[2])
            alone = alone and not answer[1]
        if alone:
            await self._redis.batch([("SET", self.keys.config, config_json)])
        else:
            (present,) = await self._redis.batch([("GET", self.keys.config)])
            config_json = present.decode() if present else config_json
        for table in TABLES:
            await self.refresh(table)
        return config_json

    def _see(self, table: str, values: Sequence[int], *, trust: bool = False) -> TableView:
        view = TableView.from_reply(values)
        if view.rev > self.views[table].rev or (trust and view != self.views[table]):
            self.views[table] = view
            for listener in self._listeners:
                listener(table)
        return view

    async def _table_verb(self, name: str, table: str, *arguments: str | bytes | int) -> list[Any]:
        before = self.views[table].rev
        answer = await self._redis.verb(name, table, *arguments)
        view = self._see(table, answer[1])
        if view.rev < before:
            await self._doubt(table, before)
            if name in _GIVING:
                raise lost_state()
        return checked(answer)

    async def _doubt(self, table: str, before: int) -> None:
        """The figures went back: Redis has lost what it had acknowledged, and everybody must know."""
        self._prompts.clear()
        self.payloads.at_hand.clear()
        answer = await self._redis.verb("doubt", table, before)
        after = self._see(table, answer[1], trust=True).rev
        log.error("Redis went back from revision %d to %d", before, after, extra={"table": table})

    async def refresh(self, table: str) -> TableView:
        """Reads the figures anew; believes them even if their `rev` went back, and makes that known."""
        before = self.views[table].rev
        answer = await self._redis.verb("look", table)
        if self._see(table, answer[1], trust=True).rev < before:
            await self._doubt(table, before)
        return self.views[table]

    # ------------------------------------------------------------------------------------------- prompt tasks

    async def seed(
        self,
        table: str,
        incarnation: int,
        tasks: Sequence[trajectory.PromptTask],
        *,
        end_of_data: bool,
        withdraw: bool,
        reserve: Callable[[trajectory.PromptTask], int],
    ) -> tuple[int, int, int, int]:
        """Adds tasks; returns (added, seeded, pending, withdrawn). `reserve` gives the bytes a group may need.

        A prompt is stored before its task counts, so it is seen first whether the task can: prompts in use are not
        for a learner of the past to replace, and those whose group has ended are not to come back.
        """
        present = await self._table_verb("look", table)
        if self.views[table].incarnation > incarnation:
            raise fenced()
        commands: list[tuple[str | bytes, ...]] = []
        arguments: list[str | bytes | int] = []
        for task in tasks:
            if task.ordinal > present[2]:
                blob = task.SerializeToString()
                self._remember(table, task.ordinal, blob)
                commands.append(("SET", self.keys.prompt(table, task.ordinal), blob))
            pin = str(PolicyVersion.from_proto(task.pinned)) if task.HasField("pinned") else ""
            entry = msgpack.packb([task.ordinal, task.n, pin, reserve(task), task.task_id, "", 0])
            arguments += [task.ordinal, entry, pin]
        answer = await self._redis.after(
            commands, "seed", table, incarnation, int(end_of_data), int(withdraw), *arguments
        )
        self._see(table, answer[1])
        added, seeded, pending, withdrawn = checked(answer)[2:6]
        return added, seeded, pending, withdrawn

    def _remember(self, table: str, ordinal: int, blob: bytes) -> None:
        self._prompts[(table, ordinal)] = blob
        if len(self._prompts) > _PROMPTS_CACHED:
            self._prompts.popitem(last=False)

    async def prompts(self, table: str, ordinals: Sequence[int]) -> dict[int, bytes]:
        """Serialized PromptTasks by ordinal; missing ones are left out."""
        found = {o: self._prompts[(table, o)] for o in ordinals if (table, o) in self._prompts}
        missing = [o for o in ordinals if o not in found]
        if missing:
            blobs = await self._redis.mget([self.keys.prompt(table, o) for o in missing])
            for ordinal, blob in zip(missing, blobs, strict=True):
                if blob is not None:
                    found[ordinal] = blob
                    self._remember(table, ordinal, blob)
        return found

    # --------------------------------------------------------------------------------------------- generators

    async def admit(
        self,
        table: str,
        member_id: str,
        generation: int,
        serving: PolicyVersion,
        wanted: int,
        u: int,
        live_limit: int,
        token: str,
    ) -> tuple[str, list[Grant], str]:
        """Up to `wanted` grants: (status, grants, why not more). Status `moved`: u is not what the proposal says."""
        answer = await self._redis.verb(
            "admit", table, member_id, generation, serving.incarnation, serving.version, wanted, u, live_limit, token
        )
        self._see(table, answer[1])
        status = answer[0].decode()
        if status in ("suspect", "moved", "other_incarnation"):
            return status, [], status
        checked(answer)
        return status, [grant_of(item) for item in answer[2]], answer[3].decode()

    async def attach(self, table: str, member_id: str, generation: int, token: str) -> list[Grant]:
        """A generator's stream is open (again): what it holds."""
        answer = await self._table_verb("attach", table, member_id, generation, token)
        return [grant_of(item) for item in answer[2]]

    async def attach_learner(self, table: str, incarnation: int, token: str) -> list[Leased]:
        """The learner's stream is open (again): what is leased to it."""
        answer = await self._table_verb("attach", table, "learner", incarnation, token)
        return [leased_of(item) for item in answer[2]]

    async def detach(self, table: str, holder: str, token: str) -> None:
        """A stream broke: its holder's leases are shortened, unless a newer stream is open."""
        await self._table_verb("detach", table, holder, token)

    async def release(self, table: str, member_id: str, generation: int, leases: Sequence[tuple[str, str]]) -> int:
        answer = await self._table_verb("release", table, member_id, generation, *_flat(leases))
        return int(answer[2])

    async def cancelled(
        self, table: str, member_id: str, generation: int, told: Sequence[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Leases that a member works on and nobody needs; those in `told` are forgotten."""
        entries = (f"{group_id} {lease_id}" for group_id, lease_id in told)
        answer = await self._table_verb("cancelled", table, member_id, generation, _PORTION, *entries)
        pairs = (entry.decode().partition(" ") for entry in answer[2])
        return [(group_id, lease_id) for group_id, _, lease_id in pairs]

    async def write(self, table: str, writes: Sequence[Write]) -> list[Written]:
        """Stores outcomes: one round trip, and a second one where something stored is not needed (any more)."""
        values: list[SetValue] = []
        drafts: list[SetValue] = []
        arguments: list[bytes] = []
        # What is equal is said once: of the members of one lease nearly all.
        for (group_id, lease_id, attempt, ranges), members in groupby(writes, _LEASE):
            outcomes: list[str | bytes | int] = [group_id, lease_id, str(attempt), ranges]
            prefix = self.keys.payloads(table, group_id)
            for w in members:
                member = str(w.member)
                if w.draft:
                    place = DraftPlace(w.member, attempt, w.tokens)
                    drafts.append(self.drafts.set(table, group_id, place, w.payload))
                    outcomes += (member, -1, w.size, w.tokens, w.meta)
                elif w.scored:
                    if not w.pieces:
                        values.append(set_whole(f"{prefix}{member}:{attempt}", w.payload))
                    outcomes += (member, w.pieces or 1, w.size, w.tokens, w.meta)
                else:
                    outcomes += (member, 0, 0, w.reason, w.meta)
            arguments.append(packed(outcomes))
        self.writing += 1
        try:
            *replies, answer = await self._redis.after_all([*values, *drafts], "write", table, *arguments)
        finally:
            self.writing -= 1
        self._see(table, answer[1])
        self.payloads.keep(values, replies[: len(values)])
        results = [_WRITTEN[status] for status in answer[2]]
        sealed = tuple([w.group_id for w, result in zip(writes, results, strict=True) if result.sealed])
        self.sealed[table] = Sealed(answer[1][0], sealed)
        await self._drop_useless(table, writes, results, answer[3])
        return results

    async def member_state(self, table: str, group_id: str, lease_id: str, attempt: int, member: int) -> int:
        """Whether a holder may write a member: 1 it may, 2 it is stored, 3 its right is gone, 4 no such member."""
        answer = await self._table_verb("member", table, group_id, lease_id, attempt, member)
        return int(answer[2])

    async def metas(self, table: str, members: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Serialized MemberMetas; None where the group has ended or the member is not stored."""
        return await self._redis.batch(
            [("HGET", self.keys.table(table, f"g:{group_id}"), member) for group_id, member in members]
        )

    async def alive(self, table: str, group_ids: Sequence[str]) -> list[bool]:
        """Which groups have not ended."""
        commands = [("EXISTS", self.keys.table(table, f"g:{group_id}")) for group_id in group_ids]
        return [bool(found) for found in await self._redis.batch(commands)]

    async def _drop_useless(
        self, table: str, writes: Sequence[Write], results: Sequence[Written], drafts: Sequence[Any]
    ) -> None:
        """Removes superseded values, and drafts that are not needed (any more): (index of the write, name), ..."""
        keys = []
        for index, name in zip(drafts[::2], drafts[1::2], strict=True):
            keys += self.drafts.keys_of(table, writes[index].group_id, name)
        for w, result in zip(writes, results, strict=True):
            if result.status >= _SUPERSEDED and w.scored:
                keys += self.payloads.keys_of(table, w.group_id, w.place)
        await self._redis.batch([("UNLINK", key) for key in keys])

    # ------------------------------------------------------------------------------------------------ learner

    async def peek(self, table: str, version: int, count: int) -> Outlook:
        answer = await self._table_verb("peek", table, version, count)
        candidates = tuple(Candidate(gid.decode(), deadline, float(order)) for gid, deadline, order in answer[2])
        return Outlook(candidates, tuple(answer[3]), int(answer[4]), int(answer[5]))

    async def sample(
        self, table: str, incarnation: int, version: int, group_ids: Sequence[str], token: str
    ) -> list[Leased]:
        answer = await self._table_verb("sample", table, incarnation, version, token, *group_ids)
        return [leased_of(item) for item in answer[2]]

    async def places(self, table: str, group_ids: Sequence[str]) -> dict[str, tuple[Place, ...]]:
        """Where the payloads of live groups are; nothing for those that are not live."""
        answer = await self._table_verb("payloads", table, *group_ids)
        return {group_id: places(text) for group_id, text in zip(group_ids, answer[2], strict=True)}

    async def facts(self, table: str, group_ids: Sequence[str]) -> list[GroupFacts]:
        """What a score is asked about; groups that have ended are left out."""
        answer = await self._table_verb("facts", table, *group_ids)
        return [facts_of(item) for item in answer[2]]

    async def set_priorities(self, table: str, incarnation: int, priorities: Sequence[tuple[str, float, int]]) -> int:
        """Changes (group id, priority, weight); returns the number of groups changed."""
        flat = [part for gid, priority, weight in priorities for part in (gid, repr(priority), weight)]
        answer = await self._table_verb("set_priorities", table, incarnation, *flat)
        return int(answer[2])

    async def claim(
        self, table: str, incarnation: int, train_version: int, leases: Sequence[tuple[str, str]]
    ) -> tuple[bool, list[tuple[str, str]], bool]:
        """(claimed, refusals as (group id, reason), whether a checkpoint is wanted)."""
        answer = await self._table_verb("claim", table, incarnation, train_version, *_flat(leases))
        refused = [(gid.decode(), reason.decode()) for gid, reason in answer[3]]
        return bool(answer[2]), refused, bool(answer[2] and answer[4])

    async def commit(self, table: str, incarnation: int, version: int, checkpoint: str) -> int:
        """Uses below `version` are durable; returns the groups that became trained."""
        trained, left = 0, 1
        while left:
            answer = await self._table_verb("commit", table, incarnation, version, checkpoint, _PORTION)
            trained, left = trained + answer[2], answer[3]
        return trained

    async def resume(
        self, table: str, member_id: str, version: int, *, takeover: bool, force: bool, lease_ms: int
    ) -> list[Any]:
        """The verb's raw answer: its refusals need words that only the caller knows."""
        answer = await self._redis.verb("resume", table, member_id, version, int(takeover), int(force), lease_ms)
        self._see(table, answer[1])
        return answer

    async def reassert(
        self,
        table: str,
        incarnation: int,
        member_id: str,
        version: int,
        *,
        lease_ms: int,
        more: bool,
        takeovers: Sequence[tuple[int, int]],
        uses: Sequence[tuple[str, int, int]],
    ) -> tuple[int, int]:
        """Uses as (group id, train version, ordinal), oldest first; returns groups (corrected, unknown)."""
        answer = await self._table_verb(
            "reassert", table, incarnation, member_id, version, lease_ms, int(more), len(takeovers),
            *(part for pair in takeovers for part in pair), *(part for use in uses for part in use),
        )  # fmt: skip
        return int(answer[2]), int(answer[3])

    async def nack(
        self, table: str, incarnation: int, leases: Sequence[tuple[str, str]], disposition: str, reason: str
    ) -> int:
        answer = await self._table_verb("nack", table, incarnation, disposition, reason, *_flat(leases))
        return int(answer[2])

    async def set_policy(self, incarnation: int, version: int) -> int:
        answer = await self._redis.verb("set_policy", "", incarnation, version)
        checked(answer)
        self._see("train", answer[1])
        await self.refresh("eval")
        return int(answer[2])

    # ------------------------------------------------------------------------------------------------- upkeep

    async def evict(self, table: str) -> int:
        """Ends all groups that cannot train within the bound any more; returns how many."""
        evicted, left = 0, 1
        while left:
            answer = await self._table_verb("evict", table, _PORTION)
            evicted, left = evicted + answer[2], answer[3]
        return evicted

    async def expire(self, table: str, member_ttl_ms: int) -> tuple[int, int, bool]:
        """Ends leases that ran out: (generating, leased, whether Redis had restarted)."""
        answer = await self._table_verb("expire", table, _PORTION, member_ttl_ms)
        return int(answer[2]), int(answer[3]), bool(answer[4])

    async def collect_trash(self, table: str) -> int:
        """Removes payloads and prompts of ended groups; returns the number of groups."""
        trash = self.keys.table(table, "trash")
        collected = 0
        while True:
            (entries,) = await self._redis.batch([("SRANDMEMBER", trash, _PORTION)])
            if not entries:
                return collected
            keys = []
            for entry in entries:
                group_id, ordinal, payloads, drafts = entry.decode().split("|")
                keys += self.payloads.keys_of_groups(table, [(group_id, payloads)])
                keys += self.drafts.keys_of(table, group_id, drafts)
                if ordinal:
                    keys.append(self.keys.prompt(table, ordinal))
                    self._prompts.pop((table, int(ordinal)), None)
            groups = (entry.decode().partition("|")[0] for entry in entries)
            await self.side.remove(table, groups, partial(self.alive, table))
            # In this order, so that no payload outlives the entry that names it.
            await self._redis.batch_behind([("UNLINK", *keys)] if keys else [], [("SREM", trash, *entries)])
            collected += len(entries)

    async def lose(self, table: str, leases: Sequence[tuple[str, str]]) -> None:
        """Ends groups whose prompt or payload is gone: failed(payload_lost)."""
        await self._table_verb("lose", table, *_flat(leases))

    async def redrive(self, table: str, group_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Queues prompts of failed groups again: (how many, those whose prompt is not kept any more)."""
        answer = await self._table_verb("redrive", table, *group_ids)
        return int(answer[2]), [gid.decode() for gid in answer[3]]

    async def ledger(self, table: str, failed_limit: int) -> list[Any]:
        """Counters, recount, reasons and failed groups, as the verb returns them."""
        return await self._table_verb("ledger", table, failed_limit)


def packed(values: list[str | bytes | int]) -> bytes:
    """Values one behind the other, as a script unpacks them: a packed list without its head.

    All strings are raw ones, since scripts do not know those of bytes.
    """
    head = 1 if len(values) < 16 else 3 if len(values) < 1 << 16 else 5
    whole: bytes = msgpack.packb(values, use_bin_type=False)
    return whole[head:]


def _flat(leases: Sequence[tuple[str, str]]) -> list[str]:
    return [part for pair in leases for part in pair]
