"""The buffer's store: the verbs over Redis with typed answers. Decides nothing: `buffer.policy` proposes, Lua disposes.

Payloads and prompts are plain keys that never pass through Lua. A payload is SET (first value wins) with a time to
live, together with the verb that makes it count; sealing makes it permanent; the end of its group names it in the
`trash`, from which any front removes it.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.keys import Keys
from buffer.policy.order import Candidate
from buffer.policy.rules import TABLES, TableRules
from buffer.redis_access import RedisAccess
from buffer.view import TableView
from mesh.errors import FencedError, OldGenerationError, UnreachableError
from mesh.versions import PolicyVersion
from protos import trajectory_pb2 as trajectory

log = logging.getLogger(__name__)
# Seconds for which a payload whose group is not sealed survives.
PAYLOAD_TTL_S = 24 * 3600
_PORTION = 256
_PROMPTS_CACHED = 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """A generator's right to a group. `done` has one character per member, `1` where an outcome is stored."""

    group_id: str
    lease_id: str
    attempt: int
    ordinal: int
    done: str
    parent: str


@dataclass(frozen=True, slots=True)
class Write:
    """A member's outcome, checked. `meta` is the serialized MemberMeta; `ranges` the versions of its tokens."""

    group_id: str
    lease_id: str
    attempt: int
    member: int
    scored: bool
    payload: bytes
    ranges: str
    meta: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write: status 1 stored, 2 duplicate, 3 superseded, 4 no such member."""

    status: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Leased:
    """A group leased to the learner. `payloads` are (member, attempt) of the stored values."""

    group_id: str
    lease_id: str
    for_version: int
    ordinal: int
    attempt: int
    generating_ms: int
    queued_ms: int
    payloads: tuple[tuple[int, int], ...]
    metas: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the policy needs to choose a batch."""

    candidates: tuple[Candidate, ...]
    live_by_deadline: tuple[int, ...]
    taken: int
    earlier: int


class Store:
    """The verbs of one run.

    Args:
        access: Redis.
        run_name: names the keys.
    """

    def __init__(self, access: RedisAccess, run_name: str) -> None:
        self._redis = access
        self.keys = Keys(run_name)
        self.views: dict[str, TableView] = {table: TableView() for table in TABLES}
        self._listeners: list[Callable[[str], None]] = []
        self._prompts: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(table)` whenever newer figures of a table are known."""
        self._listeners.append(listener)

    async def bootstrap(self, rules: dict[str, TableRules], config_json: str) -> None:
        """Loads the verbs and writes rules and configuration; repeated at every start."""
        await self._redis.load()
        for table, table_rules in rules.items():
            fields = [part for pair in table_rules.to_fields().items() for part in pair]
            await self._redis.verb("bootstrap", table, *fields)
        await self._redis.batch([("SET", self.keys.config, config_json)])
        for table in TABLES:
            await self.refresh(table)

    def _see(self, table: str, values: Sequence[int], *, trust: bool = False) -> TableView:
        view = TableView.from_reply(values)
        if view.rev > self.views[table].rev or (trust and view != self.views[table]):
            self.views[table] = view
            for listener in self._listeners:
                listener(table)
        return view

    async def _table_verb(self, name: str, table: str, *arguments: str | bytes | int) -> list[Any]:
        answer = await self._redis.verb(name, table, *arguments)
        self._see(table, answer[1])
        return _checked(answer)

    async def refresh(self, table: str) -> TableView:
        """Reads the figures anew; believes them even if their `rev` went back (Redis lost state)."""
        answer = await self._redis.verb("look", table)
        return self._see(table, answer[1], trust=True)

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
        """Adds tasks; returns (added, seeded, pending, withdrawn). `reserve` gives the bytes a group may need."""
        commands: list[tuple[str | bytes, ...]] = []
        arguments: list[str | int] = []
        for task in tasks:
            blob = task.SerializeToString()
            self._remember(table, task.ordinal, blob)
            commands.append(("SET", self.keys.prompt(table, task.ordinal), blob))
            pin = str(PolicyVersion.from_proto(task.pinned)) if task.HasField("pinned") else ""
            entry = json.dumps([task.ordinal, task.n, pin, reserve(task), task.task_id, "", 0])
            arguments += [task.ordinal, entry, pin]
        answer = await self._redis.after(
            commands, "seed", table, incarnation, int(end_of_data), int(withdraw), *arguments
        )
        self._see(table, answer[1])
        added, seeded, pending, withdrawn = _checked(answer)[2:6]
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
        if status in ("moved", "other_incarnation"):
            return status, [], status
        _checked(answer)
        return status, [_grant(item) for item in answer[2]], answer[3].decode()

    async def attach(self, table: str, member_id: str, generation: int, token: str) -> list[Grant]:
        """A generator's stream is open (again): what it holds."""
        answer = await self._table_verb("attach", table, member_id, generation, token)
        return [_grant(item) for item in answer[2]]

    async def attach_learner(self, table: str, incarnation: int, token: str) -> list[Leased]:
        """The learner's stream is open (again): what is leased to it."""
        answer = await self._table_verb("attach", table, "learner", incarnation, token)
        return [_leased(item) for item in answer[2]]

    async def detach(self, table: str, holder: str, token: str) -> None:
        """A stream broke: its holder's leases are shortened, unless a newer stream is open."""
        await self._table_verb("detach", table, holder, token)

    async def release(self, table: str, member_id: str, generation: int, leases: Sequence[tuple[str, str]]) -> int:
        answer = await self._table_verb("release", table, member_id, generation, *_flat(leases))
        return int(answer[2])

    async def write(self, table: str, writes: Sequence[Write]) -> list[Written]:
        """Stores outcomes: one round trip, and a second one where groups were sealed."""
        commands: list[tuple[str | bytes | int, ...]] = []
        arguments: list[str | bytes | int] = []
        for w in writes:
            if w.scored:
                key = self.keys.payload(table, w.group_id, w.member, w.attempt)
                commands.append(("SET", key, w.payload, "EX", PAYLOAD_TTL_S, "NX"))
            arguments += [
                w.group_id, w.lease_id, w.attempt, w.member, int(w.scored), len(w.payload), w.ranges, w.meta,
            ]  # fmt: skip
        answer = await self._redis.after(commands, "write", table, *arguments)
        self._see(table, answer[1])
        results = [Written(int(status), bool(sealed)) for status, sealed, _ in answer[2]]
        await self._settle(table, writes, answer[2])
        return results

    async def _settle(self, table: str, writes: Sequence[Write], answers: Sequence[Any]) -> None:
        """Makes payloads of sealed groups permanent and removes those of superseded writes."""
        commands: dict[str, str] = {}
        for w, (status, _, payloads) in zip(writes, answers, strict=True):
            for member, attempt in _members(payloads):
                commands[self.keys.payload(table, w.group_id, member, attempt)] = "PERSIST"
            if status >= 3 and w.scored:
                commands[self.keys.payload(table, w.group_id, w.member, w.attempt)] = "UNLINK"
        await self._redis.batch([(command, key) for key, command in commands.items()])

    # ------------------------------------------------------------------------------------------------ learner

    async def peek(self, table: str, version: int, count: int) -> Outlook:
        answer = await self._table_verb("peek", table, version, count)
        candidates = tuple(Candidate(gid.decode(), deadline, order) for gid, deadline, order in answer[2])
        return Outlook(candidates, tuple(answer[3]), int(answer[4]), int(answer[5]))

    async def sample(
        self, table: str, incarnation: int, version: int, group_ids: Sequence[str], token: str
    ) -> list[Leased]:
        answer = await self._table_verb("sample", table, incarnation, version, token, *group_ids)
        return [_leased(item) for item in answer[2]]

    async def payloads(self, table: str, groups: Sequence[Leased]) -> list[list[bytes | None]]:
        """The stored values of each group in the order of its `payloads`; None where one is lost."""
        keys = [self.keys.payload(table, g.group_id, m, a) for g in groups for m, a in g.payloads]
        found = iter(await self._redis.mget(keys))
        return [[next(found) for _ in g.payloads] for g in groups]

    async def fetch(self, table: str, members: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Payloads of single members of live groups."""
        group_ids = list(dict.fromkeys(group_id for group_id, _ in members))
        answer = await self._table_verb("payloads", table, *group_ids)
        attempts = {
            (group_id, member): attempt
            for group_id, text in zip(group_ids, answer[2], strict=True)
            for member, attempt in _members(text)
        }
        return await self._redis.mget([self.keys.payload(table, g, m, attempts.get((g, m), 0)) for g, m in members])

    async def claim(
        self, table: str, incarnation: int, train_version: int, leases: Sequence[tuple[str, str]]
    ) -> tuple[bool, list[tuple[str, str]]]:
        """(claimed, refusals as (group id, reason))."""
        answer = await self._table_verb("claim", table, incarnation, train_version, *_flat(leases))
        return bool(answer[2]), [(gid.decode(), reason.decode()) for gid, reason in answer[3]]

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

    async def nack(
        self, table: str, incarnation: int, leases: Sequence[tuple[str, str]], disposition: str, reason: str
    ) -> int:
        answer = await self._table_verb("nack", table, incarnation, disposition, reason, *_flat(leases))
        return int(answer[2])

    async def set_policy(self, incarnation: int, version: int) -> int:
        answer = await self._redis.verb("set_policy", "", incarnation, version)
        _checked(answer)
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
                group_id, ordinal, payloads = entry.decode().split("|")
                keys += [self.keys.payload(table, group_id, m, a) for m, a in _members(payloads)]
                if ordinal:
                    keys.append(self.keys.prompt(table, ordinal))
                    self._prompts.pop((table, int(ordinal)), None)
            await self._redis.batch([*([("UNLINK", *keys)] if keys else []), ("SREM", trash, *entries)])
            collected += len(entries)

    async def lose(self, table: str, leases: Sequence[tuple[str, str]]) -> None:
        """Ends groups whose prompt or payload is gone: failed(payload_lost)."""
        await self._table_verb("lose", table, *_flat(leases))

    async def ledger(self, table: str, failed_limit: int) -> list[Any]:
        """Counters, recount, reasons and failed groups, as the verb returns them."""
        return await self._table_verb("ledger", table, failed_limit)


def fenced() -> FencedError:
    """What a learner of an older incarnation is told."""
    return FencedError(
        "another learner has taken this run over",
        hint="stop this process; the newer incarnation goes on with the run",
    )


def _checked(answer: list[Any]) -> list[Any]:
    status = answer[0]
    if status == b"fenced":
        raise fenced()
    if status == b"old_generation":
        raise OldGenerationError("this connection generation is over", hint="join the mesh again")
    if status == b"replaced":
        raise UnreachableError("a newer stream of the same member is open", hint="use that one")
    return answer


def _flat(leases: Sequence[tuple[str, str]]) -> list[str]:
    return [part for pair in leases for part in pair]


def _members(text: bytes | str) -> list[tuple[int, int]]:
    """`member:attempt,...` as pairs."""
    plain = text.decode() if isinstance(text, bytes) else text
    return [(int(m), int(a)) for m, _, a in (part.partition(":") for part in plain.split(",") if part)]


def _grant(item: Sequence[Any]) -> Grant:
    gid, lease, attempt, ordinal, done, parent = item
    return Grant(gid.decode(), lease.decode(), int(attempt), int(ordinal), done.decode(), parent.decode())


def _leased(item: Sequence[Any]) -> Leased:
    gid, lease, version, ordinal, attempt, generating, queued, payloads, metas = item
    return Leased(
        gid.decode(), lease.decode(), version, ordinal, attempt, generating, queued,
        tuple(_members(payloads)), tuple(metas),
    )  # fmt: skip
