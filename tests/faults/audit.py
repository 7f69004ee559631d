"""The fate of every group that was admitted and every trajectory that was stored.

The compared records were kept by three parties that do not trust one another. They are the fronts' record of stored
members, Redis (state sets and counters), and the learner's consumption log. The log is on disk before the optimizer
steps.

* lost: groups that were admitted and are in no state, not trained, and not counted under another fate. Also stored
  trajectories that neither their group's live state nor the use of their group has.
* duplicated: a (group, use) that is twice on the surviving lineage, or a prompt task that two groups there stand for.

Redis may have been made to lose what it had acknowledged (`Loss`). A write acknowledged outside of those times is
missed as ever. A trajectory that was stored in such a time may be gone, and may be stored a second time: it is
forgotten, not lost. That it was trained is not forgotten: the consumption log has it, and it may not be trained again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgpack
import redis

from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.learner.recovery.consumption_log import StepUse, read_log, surviving_uses
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import StoreError, UnreachableError
from rollmesh.mesh.lease_holders import describe_holders
from rollmesh.protos import buffer_pb2
from tests.faults.moments import STATES
from tests.faults.observe import Step, Stored
from tests.faults.redis_disk import Loss

T = TypeVar("T")
_ANSWER_S = 30.0
# Holders that are named.
_NAMED = 10
_OTHER_FATES = ("evicted_stale", "filtered", "failed")


@dataclass(slots=True)
class Audit:
    """Findings; `problems` is empty where all is well.

    Attributes:
        groups: admitted, and how they ended or where they are.
        trajectories: stored, and how they ended or where they are.
        lost_groups, lost_trajectories, duplicated: how many.
        conserved: every admitted group is accounted for exactly once.
        steps: optimizer steps on the surviving lineage.
        discarded_steps: that were undone by a takeover.
        oldest: age of the oldest token ever trained, in versions.
        problems: one line each.
    """

    groups: dict[str, int] = field(default_factory=dict)
    trajectories: dict[str, int] = field(default_factory=dict)
    lost_groups: int = 0
    lost_trajectories: int = 0
    duplicated: int = 0
    conserved: bool = False
    steps: int = 0
    discarded_steps: int = 0
    oldest: int = 0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ask_ledger(address: str, table: str = "train") -> buffer_pb2.LedgerResponse:
    """The ledger, recounted by the mesh itself.

    Raises:
        RollmeshError: it did not answer in time.
    """
    return _ask(address, lambda view: view.ledger(table, 0))


def who_waits(address: str) -> str:
    """The learner's wait, and the holders of leases with their times, as the mesh says it.

    Raises:
        RollmeshError: it did not answer in time.
    """

    async def ask(view: MeshClient) -> str:
        table = await view.describe("train")
        return f"{table.learner_waits}; {describe_holders(table, await view.holders('train', _NAMED))}"

    return _ask(address, ask)


def _ask(address: str, question: Callable[[MeshClient], Awaitable[T]]) -> T:
    """Asked again while a front is finding Redis again."""

    async def ask() -> T:
        until = time.monotonic() + _ANSWER_S
        async with MeshClient(address, SecuritySection()) as view:
            while True:
                try:
                    return await question(view)
                except (StoreError, UnreachableError):
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(0.2)

    return asyncio.run(ask())


def imbalances(address: str) -> list[str]:
    """Faults that `rollmesh ledger` finds, and whether its counts add up."""
    found = []
    for table in ("train", "eval"):
        answer = ask_ledger(address, table)
        counts = answer.counters
        found += answer.discrepancies
        fates = counts.trained + sum(getattr(counts, name) for name in _OTHER_FATES)
        live = sum(getattr(counts, name) for name in STATES)
        if counts.admitted != fates + live:
            found.append(f"{table}: admitted {counts.admitted} != {fates} with a fate + {live} alive")
    return found


def key_of(use: StepUse) -> list[tuple[str, int]]:
    """(group, use) of every group of a step."""
    return [(group.group_id, group.use) for group in use.groups]


def doubled(uses: Iterable[StepUse]) -> list[tuple[str, int]]:
    """Groups used twice on the surviving lineage."""
    times = Counter(key for use in surviving_uses(list(uses)) for key in key_of(use))
    return [key for key, count in times.items() if count > 1]


@dataclass(frozen=True, slots=True)
class Live:
    """Groups that are in a state now.

    Attributes:
        states: group -> state.
        members: group -> members that are stored.
        last: number of the newest group; numbers leap where Redis was restarted.
    """

    states: dict[str, str]
    members: dict[str, set[int]]
    last: int

    @classmethod
    def read(cls, client: redis.Redis, run: str = "run", table: str = "train") -> Live:
        """As Redis has it, read without the product's code."""
        prefix = f"{{rollmesh:{run}}}:{table}"
        states: dict[str, str] = {}
        for state in STATES:
            for name in cast("list[bytes]", client.zrange(f"{prefix}:{state}", 0, -1)):
                states[name.decode()] = state
        with client.pipeline(transaction=False) as pipe:
            for group in states:
                pipe.hkeys(f"{prefix}:g:{group}")
            found = zip(states, pipe.execute(), strict=True)
            members = {group: {int(name) for name in fields if name.isdigit()} for group, fields in found}
        return cls(states, members, int(msgpack.unpackb(cast("bytes", client.hget(prefix, "counters")))["seq"]))

    def has(self, group: str, member: int) -> bool:
        """True where a member of a live group is stored."""
        return member in self.members.get(group, ())


def audit(
    *,
    consumption: Path,
    counters: dict[str, int],
    live: Live,
    stored: Sequence[Stored],
    steps: Sequence[Step],
    bound: int,
    max_reuse: int,
    losses: Sequence[Loss] = (),
) -> Audit:
    """Compares the records; the mesh is at rest.

    Args:
        consumption: the learner's log.
        counters: of the ledger.
        live: what Redis has.
        stored: what fronts stored.
        steps: as recorded by the learner.
        bound: the greatest staleness allowed.
        max_reuse: steps that may use a group.
        losses: when Redis may have lost acknowledged writes.
    """
    uses = list(read_log(consumption)) if consumption.exists() else []
    lineage = surviving_uses(uses)
    taken = {(use.incarnation, use.train_version) for use in uses}
    found = Audit(steps=len(lineage), discarded_steps=len(taken) - len(lineage))
    used = {group.group_id: set(group.members) for use in lineage for group in use.groups}
    _uses(found, lineage, live, max_reuse)
    _groups(found, used, counters, live, {entry.group for entry in stored})
    _trajectories(found, used, live, stored, losses)
    if unlogged := {(step.incarnation, step.version - 1) for step in steps} - taken:
        found.problems.append(f"trained without a line in the consumption log: {sorted(unlogged)[:5]}")
    versions = [use.train_version for use in lineage]
    if versions != list(range(len(versions))):
        found.problems.append("the surviving lineage has a hole: a version was trained by nobody or twice")
    found.oldest = max((step.oldest for step in steps), default=0)
    if found.oldest > bound:
        found.problems.append(f"a token of age {found.oldest} was trained, the bound is {bound}")
    return found


def _uses(found: Audit, lineage: Sequence[StepUse], live: Live, max_reuse: int) -> None:
    twice = doubled(lineage)
    owners: dict[int, set[str]] = defaultdict(set)
    for entry in (entry for use in lineage for entry in use.groups):
        owners[entry.ordinal].add(entry.group_id)
    again = [sorted(groups) for groups in owners.values() if len(groups) > 1]
    found.duplicated = len(twice) + len(again)
    if twice:
        found.problems.append(f"trained twice: {twice[:5]}")
    if again:
        found.problems.append(f"one prompt task trained as several groups: {again[:5]}")
    times: dict[str, list[int]] = defaultdict(list)
    for group, use in (key for step in lineage for key in key_of(step)):
        times[group].append(use)
    if holes := [group for group, uses in times.items() if not twice and uses != list(range(1, len(uses) + 1))]:
        found.problems.append(f"uses that do not follow one another: {holes[:5]}")
    if over := [group for group, uses in times.items() if len(uses) > max_reuse]:
        found.problems.append(f"used more than {max_reuse} times: {over[:5]}")
    waiting = {group for group, state in live.states.items() if state != "consumed"}
    if spent := {group for group in waiting if len(times[group]) >= max_reuse}:
        found.problems.append(f"trained, and about to be trained again: {sorted(spent)[:5]}")


def _groups(found: Audit, used: dict[str, set[int]], counters: dict[str, int], live: Live, written: set[str]) -> None:
    admitted = counters["admitted"]
    consumed = {group for group, state in live.states.items() if state == "consumed"}
    if strange := {group for group in set(used) | set(live.states) | written if _number(group) > live.last}:
        found.problems.append(f"never admitted: {sorted(strange)[:5]}")
    if unused := consumed - set(used):
        found.problems.append(f"consumed by a step that the consumption log does not have: {sorted(unused)[:5]}")
    committed = set(used) - set(live.states)
    if len(committed) != counters["trained"]:
        found.problems.append(f"{len(committed)} groups were trained for good, the ledger has {counters['trained']}")
    other = {fate: counters[fate] for fate in _OTHER_FATES}
    rest = admitted - len(committed) - len(live.states)
    found.lost_groups = rest - sum(other.values())
    if found.lost_groups:
        found.problems.append(f"{rest} groups are neither trained nor alive, {sum(other.values())} have another fate")
    by_state = Counter(live.states.values())
    found.groups = {"admitted": admitted, "trained": len(committed), **other} | {s: by_state[s] for s in STATES}
    found.conserved = admitted == sum(found.groups.values()) - admitted


def _number(group: str) -> int:
    return int(group.rpartition("-")[2])


def _trajectories(
    found: Audit, used: dict[str, set[int]], live: Live, stored: Sequence[Stored], losses: Sequence[Loss]
) -> None:
    """Members are told apart by (group, member): at most one stored value per member is the buffer's promise."""
    outcomes: dict[str, dict[int, Stored]] = defaultdict(dict)
    twice = 0
    for entry in sorted(stored, key=lambda entry: entry.at):
        before = outcomes[entry.group].get(entry.member)
        twice += before is not None and not _forgotten(before, losses)
        outcomes[entry.group][entry.member] = entry
    if twice:
        found.problems.append(f"{twice} members were stored twice")
    ends: Counter[str] = Counter()
    lost: list[tuple[str, int]] = []
    for entry in (entry for members in outcomes.values() for entry in members.values()):
        ends["stored"] += 1
        if not entry.scored:
            end = "without_reward"
        elif entry.group in used:
            end = "trained" if entry.member in used[entry.group] else "missing"
        elif entry.group in live.states:
            end = "alive" if live.has(entry.group, entry.member) else "missing"
        else:
            end = "ended_with_their_group"
        if end == "missing" and _forgotten(entry, losses):
            end = "forgotten"
        elif end == "missing":
            lost.append((entry.group, entry.member))
        ends[end] += 1
    # Stored by a front that was killed before it could say so: the generator's repetition was a duplicate.
    ends["trained_unacknowledged"] = sum(len(members - set(outcomes.get(g, ()))) for g, members in used.items())
    found.trajectories = dict(ends)
    found.lost_trajectories = len(lost)
    if lost:
        found.problems.append(f"stored and acknowledged, then gone: {lost[:5]}")


def _forgotten(entry: Stored, losses: Sequence[Loss]) -> bool:
    """True where Redis may have lost it although it was acknowledged."""
    return any(loss.covers(entry.at) for loss in losses)
