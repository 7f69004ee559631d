"""The state machine and the Lua verbs lose the same state, are told the same log, and must agree afterwards.

Redis is set back to a copy of its keys, the machine to a copy of itself; the log knows everything up to now. Over the
whole history, losses and takeovers among them, no group is used more often than it may be.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from rollmesh.buffer.policy.rules import Order
from rollmesh.buffer.reference_model.state_recovery import RecordedUse, RecoveryReport, reassert
from rollmesh.buffer.reference_model.table_machine import TableMachine
from rollmesh.buffer.reference_model.table_state import Fenced, Suspect
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.both_machines import BothMachines
from tests.buffer.comparison import MEMBERS


class LosingMachines(BothMachines):
    """With commands that copy the state and go back to the copy."""

    BOUNDED = True

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[tuple[str, int], int] = {}
        self.takeovers: dict[int, int] = {}
        self.copy: tuple[dict[bytes, bytes], TableMachine, int, dict[str, int]] | None = None
        self.found: Counter[str] = Counter()
        self.last: tuple[int, list[RecordedUse], bool, int] | None = None

    @invariant()
    def keep_log(self) -> None:
        """As the consumption log: what was used on the surviving lineage, and never more often than allowed."""
        if not hasattr(self, "machine"):
            return
        if self.incarnation not in self.takeovers:
            k = dict(self.machine.lineage.resumed)[self.incarnation]
            self.takeovers[self.incarnation] = k
            self.log = {(gid, version): o for (gid, version), o in self.log.items() if version < k}
        for group in self.machine.groups.values():
            self.log.update({(group.group_id, version): group.task.ordinal for version in group.uses})
        used = Counter(gid for gid, _ in self.log)
        assert max(used.values(), default=0) <= self.rules.max_reuse

    @rule()
    def remember(self) -> None:
        self._record_progress()
        self.copy = (self.call(self._dump()), copy.deepcopy(self.machine), self.moved_ms, dict(self.generations))

    async def _dump(self) -> dict[bytes, bytes]:
        keys = [key async for key in self.redis.scan(f"{_escaped(self.keys.run)}*")]
        return dict(zip(keys, await self.redis.batch([("DUMP", key) for key in keys]), strict=True))

    async def _restore(self, values: dict[bytes, bytes]) -> None:
        present = [key async for key in self.redis.scan(f"{_escaped(self.keys.run)}*")]
        restored = [("RESTORE", key, 0, value) for key, value in values.items()]
        await self.redis.batch([("DEL", *present), *restored, ("SET", f"{self.keys.run}:test_clock", self.now)])

    @rule(portions=st.integers(1, 3), repeat=st.booleans())
    def lose(self, portions: int, repeat: bool) -> None:
        """State is lost; the learner reports again which groups it has used, in portions, maybe some of them twice."""
        if self.copy is None:
            return
        incarnation = self.incarnation
        # No two losses within a millisecond: Redis is not even started in that time.
        self.time_passes(1)
        values, machine, self.moved_ms, generations = self.copy
        self.generations = dict(generations)
        self.call(self._restore(values))
        # A message of the lost time is news to the state that is left.
        self.said.clear()
        self.machine = copy.deepcopy(machine)
        self.progress = self.machine.progress
        self.verb("mark_suspect", "train", 1 << 50)
        self.machine.mark_suspect(self.now)
        self._nobody_gets_anything(incarnation)
        uses = [RecordedUse(gid, v, o) for (gid, v), o in sorted(self.log.items(), key=lambda item: item[0][1])]
        if self.last is not None:
            # It arrives late: what it ends was another doubt.
            assert self._tell(*self.last) is None
            assert self.machine.suspect
            self.agree()
        doubt = self._tell(incarnation, [], more=True, doubt=0)
        assert doubt
        size = -(-len(uses) // portions) or 1
        for start in range(0, max(1, len(uses)), size):
            more = start + size < len(uses)
            for _ in range(2 if repeat and more else 1):
                self.last = (incarnation, uses[start : start + size], more, doubt)
                assert self._tell(*self.last) == doubt
        assert self._tell(incarnation, [], more=True, doubt=0) == 0, "the doubt is over"
        answer = self.verb("commit", "train", incarnation, self.machine.committed, "path", 1000)
        assert answer[2] == self.machine.commit(incarnation, self.machine.committed)
        self.found["lost"] += 1

    def _tell(self, incarnation: int, uses: list[RecordedUse], more: bool, doubt: int) -> int | None:
        """Both machines are told; the doubt that they know of then, or nothing where they refuse."""
        flat: list[Any] = [len(self.takeovers), *(part for pair in sorted(self.takeovers.items()) for part in pair)]
        flat += [part for use in uses for part in (use.group_id, use.version, use.ordinal)]
        answer = self.verb(
            "reassert",
            "train",
            incarnation,
            "learner",
            self.version,
            1000,
            int(more),
            doubt,
            *flat,
        )
        assertion = RecoveryReport(incarnation, self.version, self.takeovers, uses)
        try:
            expected = reassert(self.machine, assertion, self.now, more=more, doubt=doubt)
        except (Fenced, Suspect) as refusal:
            assert answer[0] == type(refusal).__name__.lower().encode()
            self.found["refused"] += 1
            return None
        assert answer[0] == b"ok"
        assert tuple(answer[2:5]) == expected
        self.found.update(corrected=answer[2], unknown=answer[3])
        return expected[2]

    def _nobody_gets_anything(self, incarnation: int) -> None:
        ready = list(self.machine.groups)[:2]
        assert self.verb("sample", "train", incarnation, self.machine.u, "", *ready)[0] == b"suspect"
        assert self.verb("claim", "train", incarnation, self.machine.u, "train-1", "s1")[0] == b"suspect"
        assert self.verb("resume", "train", "learner", 99, 1, 1, 1000, self.next_call())[0] == b"suspect"
        assert len(self.verb("evict", "train", 100)[2]) == self.machine.evict() == 0
        serving = PolicyVersion(self.incarnation, self.version)
        fence = self.generations["m1"]
        answer = self.verb("admit", "train", "m1", fence, *serving, 1, self.machine.u, 99, "")
        assert answer[0] == b"suspect"
        assert self.machine.admit("m1", serving, 1, 99, self.now) == []
        with pytest.raises(Suspect):
            self.machine.sample(incarnation, self.machine.u, ready, self.now)


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "{}[]*?" else c for c in text)


def walk(seed: int, steps: int) -> Counter[str]:
    """Takes random commands with losses among them; returns what the assertions found."""
    rng = random.Random(seed)
    both = LosingMachines()
    both.begin(rng.randrange(3), rng.choice(list(Order)), rng.randint(1, 3), 1 << 30)
    commands = {
        lambda: both.fill(rng.randint(1, 5), rng.choice(MEMBERS)): 5,
        lambda: both.finish_group(rng.randrange(30), rng.randrange(2)): 9,
        lambda: both.train_batch(rng.randint(1, 2), rng.random() < 0.9): 6,
        lambda: both.sample(0, 2): 1,
        lambda: both.nack(rng.randrange(30), rng.choice(["release", "filter"])): 1,
        lambda: both.commit(rng.randrange(1, 4)): 2,
        lambda: both.take_over(rng.randrange(3)): 1,
        lambda: both.claim_again(rng.randrange(30), 0) if both.claimed else None: 1,
        lambda: both.write_any(rng.randrange(30), rng.randrange(2), [0]) if both.old else None: 2,
        lambda: both.seed(rng.randint(1, 4), rng.random() < 0.5, False, False): 1,
        both.evict: 1,
        both.expire: 1,
        both.lose_holders: 0.3,
        both.remember: 1.5,
        lambda: both.lose(rng.randint(1, 3), rng.random() < 0.5): 1,
    }
    try:
        for _ in range(steps):
            rng.choices(list(commands), list(commands.values()))[0]()
            both.keep_log()
            both.agree()
        return both.found
    finally:
        both.teardown()


def test_no_attempt_of_the_lost_time_comes_again(redis_url: str) -> None:
    """Members that its holder has stored would be found under its name, where that lies in a Redis that has lost
    nothing.
    """
    LosingMachines.url = redis_url
    both = LosingMachines()
    both.begin(1, Order.IN_ORDER, 1, 1 << 30)
    try:
        both.fill(1, "m1")
        given: list[tuple[str, int]] = []
        for _ in range(3):
            both.lose_holders()
            both.remember()
            both.admit("m2", 0, 1)
            given += [(group.group_id, group.attempt) for group in both.machine.groups.values()]
            both.lose(1, False)
            both.agree()
        assert len(set(given)) == 3
    finally:
        both.teardown()


@pytest.mark.parametrize("ended", ["evicted", "failed"])
def test_a_prompt_leaves_the_group_from_which_the_lost_admission_took_it(redis_url: str, ended: str) -> None:
    """It was queued again when its first group had ended, trained in a second one, and is back in the first."""
    LosingMachines.url = redis_url
    both = LosingMachines()
    both.begin(1, Order.IN_ORDER, 1, 1 << 30)
    try:
        both.fill(1, "m1")
        (first,) = both.machine.groups
        if ended == "evicted":
            both.finish_group(0, 0)
            both.remember()
            both.outdate()
        else:
            both.fail_group(0)
            both.remember()
            both.redrive(0, 1)
        both.admit("m2", 0, 1)
        both.finish_group(0, 0)
        both.train_batch(1, True)
        both.keep_log()
        ((second, version),) = both.log
        assert second != first
        both.lose(1, False)
        both.agree()
        group = both.machine.groups[second]
        assert (group.uses, group.task.n, both.found["unknown"]) == ([version], 2, 1)
        assert first not in both.machine.groups
    finally:
        both.teardown()


def test_machine_and_lua_agree_after_losses_on_long_walks(redis_url: str) -> None:
    LosingMachines.url = redis_url
    found: Counter[str] = sum((walk(seed, 90) for seed in range(8)), Counter())
    assert found["lost"] > 12
    assert found["corrected"] > 8
    assert found["unknown"] > 4
    assert found["refused"] > 4


def test_machine_and_lua_agree_after_losses_on_generated_commands(redis_url: str) -> None:
    LosingMachines.url = redis_url
    run_state_machine_as_test(
        LosingMachines,
        settings=settings(max_examples=6, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
