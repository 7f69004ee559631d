"""The book of groups: every grant ends in exactly one way, whatever the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollmesh.generators.rollout.rollout_manager as rollout_module
from rollmesh.generators.engines.types import EngineStatus, FinishReason, GenerationResult
from rollmesh.generators.rollout import circuit_breaker
from rollmesh.generators.rollout.active_group import ActiveGroup, sampling_of
from rollmesh.generators.rollout.capacity import Capacity, CapacitySettings
from rollmesh.generators.rollout.credits import InFlight, credits_for, group_share
from rollmesh.generators.rollout.response_source import MemberRequest
from rollmesh.generators.rollout.rollout_manager import Batch, RolloutHandlers, RolloutManager
from rollmesh.generators.weights import pinned_groups
from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, trajectory_pb2

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
_SERVING: dict[str, Any] = {"serving": V0, "digest": "", "failure": None}


class Engine:
    """Keeps requests; refuses prompts that start with 99, and prefixes above the budget."""

    def __init__(self) -> None:
        self.requests: list[MemberRequest] = []
        self.aborted: list[str] = []
        self.submissions = 0
        self.serving = V0

    def submit(self, requests: Sequence[MemberRequest]) -> None:
        if any(request.prompt_ids[0] == 99 for request in requests):
            raise PayloadError("prompt_ids[0]", "99 is not in the vocabulary")
        if any(request.prefix is not None and len(request.prefix) > 8 for request in requests):
            raise PayloadError("prefix", "9 tokens are more than max_tokens 8")
        self.submissions += 1
        self.requests.extend(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted.extend(request_ids)

    def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, self.serving, "", None)


class Book:
    """A rollout loop whose surroundings are lists."""

    def __init__(self, *, episodes: bool = False, whole_groups: Callable[[], bool] = lambda: False) -> None:
        self.engine = Engine()
        self.batches: list[Batch] = []
        self.failed: list[tuple[ActiveGroup, list[int], str]] = []
        self.released: list[ActiveGroup] = []
        self.loads = 0
        self.pinned = PinnedGroups()
        self.rollout = RolloutManager(
            self.engine,  # type: ignore[arg-type]  # the part of an engine that it uses
            Capacity(CapacitySettings(slots=8, n_by_table={"train": 4, "eval": 1}, share=100, adaptive=True)),
            self.pinned,
            episodes=episodes,
        )
        self.rollout.connect(
            RolloutHandlers(
                on_batch=self.batches.append,
                on_failed=lambda group, members, reason: self.failed.append((group, members, reason)),
                on_release=self.released.extend,
                on_load=self._loaded,
                whole_groups=whole_groups,
            )
        )

    def _loaded(self) -> None:
        self.loads += 1

    async def grant(self, name: str, *, table: str = "train", lease: str = "a1", n: int = 4, **fields: object) -> None:
        self.rollout.add(table, grant(name, lease=lease, n=n, **fields))
        await asyncio.sleep(0)

    def finish(self, count: int, *, version: PolicyVersion = V0, reason: FinishReason = "stop") -> None:
        """The engine finishes its first `count` requests."""
        done, self.engine.requests = self.engine.requests[:count], self.engine.requests[count:]
        self.rollout.on_results([result(request.request_id, version, reason) for request in done])

    def settle(self) -> None:
        """Everything handed on is stored."""
        for batch in self.batches:
            for group, members in batch:
                self.rollout.on_stored(group, len(members))
        self.batches.clear()


def grant(
    name: str, *, lease: str, n: int, pin: PolicyVersion | None = None, **fields: object
) -> buffer_pb2.GroupGrant:
    first, greedy = fields.pop("first_token", 3), fields.pop("greedy", 0)
    task = trajectory_pb2.PromptTask(
        task_id=name,
        n=n,
        greedy=greedy,  # type: ignore[arg-type]
        prompt_ids=np.array([first, 4], "<i4").tobytes(),
        sampling=trajectory_pb2.SamplingParams(temperature=1.0, top_k=7, max_tokens=8),
        pinned=pin.to_proto() if pin else None,
    )
    fields = {"attempt": 1} | fields
    return buffer_pb2.GroupGrant(group_id=name, lease_id=lease, task=task, **fields)  # type: ignore[arg-type]


def result(request_id: str, version: PolicyVersion, reason: FinishReason) -> GenerationResult:
    return GenerationResult(
        request_id,
        Trajectory.sampled(np.array([5, 1], np.int32), np.zeros(2, np.float32), VersionRuns(((2, version),))),
        reason,
    )


def draft(member: int, *tokens: int) -> buffer_pb2.MemberDraft:
    runs = VersionRuns(((len(tokens), V1),))
    so_far = Trajectory.sampled(np.array(tokens, np.int32), np.full(len(tokens), -0.25, np.float32), runs)
    return buffer_pb2.MemberDraft(member=member, payload=encode(so_far))


def lease(group_id: str, lease_id: str) -> buffer_pb2.LeaseRef:
    return buffer_pb2.LeaseRef(group_id=group_id, lease_id=lease_id)


def members_of(batch: Batch) -> list[tuple[str, list[int]]]:
    return [(group.group_id, [finished.member for finished in part]) for group, part in batch]


async def test_whole_groups_are_handed_on_together() -> None:
    book = Book()
    await asyncio.gather(book.grant("g1"), book.grant("g2"))
    assert book.engine.submissions == 1, "grants of one turn are submitted together"
    book.finish(3)
    assert not book.batches
    book.finish(5)
    assert members_of(book.batches[0]) == [("g1", [0, 1, 2, 3]), ("g2", [0, 1, 2, 3])]
    assert book.rollout.capacity.load == InFlight(generating=0, undelivered=8)
    assert not book.rollout.idle.is_set()
    book.settle()
    assert book.rollout.active_groups == 0
    assert book.rollout.idle.is_set()
    assert book.rollout.capacity.load == InFlight(0, 0)


async def test_finished_members_do_not_wait_for_stragglers_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "PARTIAL_AFTER_S", 0.01)
    book = Book()
    await book.grant("g1")
    book.finish(2)
    async with asyncio.timeout(180):
        while not book.batches:
            await asyncio.sleep(0.005)
    assert members_of(book.batches[0]) == [("g1", [0, 1])]
    book.finish(2)
    assert members_of(book.batches[1]) == [("g1", [2, 3])]
    book.settle()
    assert book.rollout.idle.is_set()


async def test_where_rewards_need_groups_finished_members_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "PARTIAL_AFTER_S", 0.0)
    asked = asyncio.Event()

    def whole_groups() -> bool:
        asked.set()
        return True

    book = Book(whole_groups=whole_groups)
    await book.grant("g1")
    book.finish(2)
    await asyncio.wait_for(asked.wait(), 180)
    assert not book.batches
    book.finish(2)
    assert members_of(book.batches[0]) == [("g1", [0, 1, 2, 3])]
    book.settle()
    assert book.rollout.idle.is_set()


async def test_stored_members_are_not_generated_again() -> None:
    book = Book()
    await book.grant("g1", members_done=[0, 2])
    assert len(book.engine.requests) == 2
    book.finish(2)
    assert members_of(book.batches[0]) == [("g1", [1, 3])]


async def test_members_go_on_from_their_drafts() -> None:
    book = Book()
    await book.grant("g1", members_done=[3], drafts=[draft(1, 7, 8, 9), draft(3, 5), draft(4, 5)])
    prefixes = [request.prefix for request in book.engine.requests]
    assert [prefix is None for prefix in prefixes] == [True, False, True]
    assert prefixes[1] is not None
    assert prefixes[1].response_ids.tolist() == [7, 8, 9]
    assert prefixes[1].log_probs.tolist() == [-0.25] * 3
    assert prefixes[1].versions.runs == ((3, V1),)
    assert [request.sampling.max_tokens for request in book.engine.requests] == [8, 8, 8], "of the whole response"
    assert book.rollout.taken_over == 3


async def test_what_was_not_sampled_stays_so_in_whoever_goes_on() -> None:
    """A draft of an episode holds a tool's output: its mask goes to the responder, and its task with it."""
    runs = VersionRuns(((4, V1),))
    mask = np.array([1, 0, 0, 1], np.uint8)
    so_far = Trajectory(np.array([7, 8, 9, 7], np.int32), np.zeros(4, np.float32), mask, runs)
    book = Book()
    await book.grant("g1", drafts=[buffer_pb2.MemberDraft(member=2, payload=encode(so_far)), draft(1, 7)])
    asked = book.engine.requests
    assert [bool(request.prefix.response_mask.all()) for request in asked if request.prefix is not None] == [
        True,
        False,
    ]
    assert asked[2].prefix is not None
    assert asked[2].prefix.response_mask.tolist() == mask.tolist()
    assert [(request.member, request.task.task_id) for request in asked] == [(index, "g1") for index in range(4)]


async def test_a_pinned_group_is_answered_by_one_version_alone() -> None:
    book = Book()
    await book.grant("e1", table="eval", n=1, pin=V0, drafts=[draft(0, 7)])
    assert book.engine.requests[0].prefix is None


async def test_a_useless_draft_is_no_failure() -> None:
    book = Book()
    spoilt = buffer_pb2.MemberDraft(member=0, payload=b"RMT1 and no more")
    await asyncio.gather(
        book.grant("g1", drafts=[spoilt, draft(1, 7)]),
        book.grant("g2", drafts=[draft(0, *range(9)), draft(1, 7)]),
        book.grant("bad", first_token=99, drafts=[draft(0, 7)]),
    )
    assert [(group.group_id, members) for group, members, _ in book.failed] == [("bad", [0, 1, 2, 3])]
    prefixes = [request.prefix for request in book.engine.requests]
    assert [prefix is not None for prefix in prefixes] == [False, True, False, False] + [False] * 4
    assert book.rollout.taken_over == 1
    book.finish(8)
    assert len(book.batches[0]) == 2


async def test_a_cancelled_group_frees_its_slots_at_once() -> None:
    book = Book()
    await asyncio.gather(book.grant("g1"), book.grant("g2"), book.grant("g3"))
    running = [request.request_id for request in book.engine.requests]
    assert book.rollout.capacity.credits("train") == 0
    book.finish(1)
    loads = book.loads
    book.rollout.cancel("train", [lease("g1", "a1"), lease("g2", "a0"), lease("gone", "a1")])
    assert book.engine.aborted == running[1:4]
    assert book.rollout.active_groups == 2
    assert book.rollout.capacity.credits("train") == 1, "another one may come"
    assert book.loads > loads, "and the buffer is told so"
    assert set(book.rollout.unfinished("train")) == set(running[4:])
    book.finish(3, reason="aborted")
    book.finish(8)
    assert members_of(book.batches[0]) == [("g2", [0, 1, 2, 3]), ("g3", [0, 1, 2, 3])], "a stale word changes nothing"
    assert book.rollout.cancelled == 1
    assert not book.released


async def test_a_group_cancelled_before_it_started_is_not_started() -> None:
    book = Book()
    book.rollout.add("train", grant("g1", lease="a1", n=4))
    book.rollout.cancel("eval", [lease("g1", "a1")])
    book.rollout.cancel("train", [lease("g1", "a1")])
    await asyncio.sleep(0)
    assert not book.engine.requests
    assert book.rollout.idle.is_set()
    assert not book.rollout.busy.is_set()


async def test_a_lost_group_is_dropped_and_aborted() -> None:
    book = Book()
    await book.grant("g1")
    running = [request.request_id for request in book.engine.requests]
    book.finish(1)
    group = book.rollout._groups[("train", "g1")]
    book.rollout.drop(group)
    assert book.engine.aborted == running[1:]
    book.finish(3, reason="aborted")
    assert not book.batches
    assert not book.released
    assert book.rollout.idle.is_set()


async def test_a_new_lease_on_a_held_group_starts_it_anew() -> None:
    book = Book()
    await book.grant("g1", lease="a1")
    await book.grant("g1", lease="a1")
    assert len(book.engine.requests) == 4, "the same grant twice changes nothing"
    await book.grant("g1", lease="a2")
    assert len(book.engine.aborted) == 4
    book.engine.requests = book.engine.requests[4:]
    book.finish(4)
    assert [group.grant.lease_id for group, _ in book.batches[0]] == ["a2"]


async def test_pinned_groups_are_given_back_where_another_version_answers() -> None:
    book = Book()
    await book.grant("e1", table="eval", n=1, pin=V1)
    assert [group.group_id for group in book.released] == ["e1"], "not served here"
    await book.grant("e2", table="eval", n=1, pin=V0)
    await book.grant("e3", table="eval", n=1, pin=V0)
    book.finish(1, version=V1)
    book.finish(1, version=V0)
    assert [group.group_id for group in book.released] == ["e1", "e2"], "the weights changed in between"
    assert members_of(book.batches[0]) == [("e3", [0])]


async def test_weights_are_held_until_pinned_groups_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_groups, "QUIET_S", 0.02)
    book = Book()
    await book.pinned.finished()
    await book.grant("e1", table="eval", n=1, pin=V0)
    held = asyncio.create_task(book.pinned.finished())
    await asyncio.sleep(0)
    book.finish(1)
    await asyncio.sleep(0)
    await book.grant("e2", table="eval", n=1, pin=V0)
    await asyncio.sleep(0.05)
    assert not held.done(), "the next of the round came"
    book.finish(1)
    await asyncio.wait_for(held, 180)


@pytest.mark.parametrize("episodes", [False, True])
async def test_pinned_episodes_hold_a_swap_and_pinned_requests_leave_it_to_the_engine(episodes: bool) -> None:
    book, held = Book(episodes=episodes), list[bool]()
    book.pinned.set_cancel_swap(lambda: held.append(True))
    await book.grant("g1")
    assert not held
    await book.grant("e1", table="eval", n=1, pin=V0)
    assert bool(held) is episodes


async def test_a_refused_prompt_fails_its_own_group_only() -> None:
    book = Book()
    await asyncio.gather(book.grant("good"), book.grant("bad", first_token=99))
    assert [(group.group_id, members) for group, members, _ in book.failed] == [("bad", [0, 1, 2, 3])]
    assert "99 is not in the vocabulary" in book.failed[0][2]
    assert len(book.engine.requests) == 4
    book.finish(4)
    book.settle()
    book.rollout.on_stored(book.failed[0][0], 4)
    assert book.rollout.idle.is_set()


async def test_a_member_that_the_engine_refuses_late_has_its_outcome() -> None:
    """Given back it would be granted, and refused, for ever."""
    book = Book()
    await book.grant("a")
    refused = replace(result(book.engine.requests[0].request_id, V0, "aborted"), refusal="not an image")
    book.rollout.on_results([refused])
    book.engine.requests.pop(0)
    book.finish(3)
    assert [[(group.group_id, len(members)) for group, members in batch] for batch in book.batches] == [[("a", 4)]]
    assert not book.released
    book.settle()
    assert book.rollout.idle.is_set()


async def test_a_generator_at_which_all_groups_fail_asks_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with one response is none of them."""
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.01)
    book = Book()

    async def fail(name: str, *, members: int = 4) -> None:
        await book.grant(name)
        asked = book.engine.requests[-4:]
        refused = [replace(result(one.request_id, V0, "aborted"), refusal="odd") for one in asked[:members]]
        answered = [result(one.request_id, V0, "stop") for one in asked[members:]]
        book.rollout.on_results([*refused, *answered])
        book.settle()

    free = book.rollout.capacity.credits("train")
    for index in range(circuit_breaker.FAILURES_IN_A_ROW):
        await fail(f"half {index}", members=3)
    for index in range(circuit_breaker.FAILURES_IN_A_ROW - 1):
        await fail(f"bad {index}")
    assert book.rollout.capacity.credits("train") == free
    assert not book.rollout.capacity.waiting_reason
    await fail("worse")
    assert "odd" in book.rollout.capacity.waiting_reason
    loads = book.loads
    async with asyncio.timeout(180):
        while book.loads == loads:
            await asyncio.sleep(0.005)
    assert book.rollout.capacity.credits("train") == book.rollout.capacity.credits("eval") == 1, (
        "the end of the pause was told"
    )
    await fail("half", members=3)
    assert book.rollout.capacity.credits("train") == free


async def test_what_is_finished_is_stored_before_its_group_is_given_back() -> None:
    """Where the engine gives up on one member, of the same turn or a later one; the others are not sampled on."""
    book = Book()
    await asyncio.gather(book.grant("early"), book.grant("same"), book.grant("none"))
    early, same, none = (book.engine.requests[index : index + 4] for index in (0, 4, 8))
    book.rollout.on_results([result(early[0].request_id, V0, "stop")])
    book.rollout.on_results(
        [
            result(early[1].request_id, V0, "aborted"),
            result(same[0].request_id, V0, "aborted"),
            result(same[1].request_id, V0, "stop"),
            result(none[0].request_id, V0, "aborted"),
        ]
    )
    assert [part for batch in book.batches for part in members_of(batch)] == [("early", [0]), ("same", [1])]
    left = [*early[2:], *same[2:], *none[1:]]
    assert sorted(book.engine.aborted) == sorted(request.request_id for request in left)
    assert [group.group_id for group in book.released] == ["none"]
    assert len(book.rollout.leases("train")) == 3, "held until the buffer has what is finished"
    book.settle()
    assert [group.group_id for group in book.released] == ["none", "early", "same"]
    assert book.rollout.idle.is_set()


async def test_draining_hands_on_what_is_finished_and_gives_back_the_rest() -> None:
    book = Book()
    await book.grant("g1")
    await book.grant("g2")
    book.finish(5)
    book.settle()
    book.rollout.stop_admitting()
    assert book.rollout.capacity.credits("train") == book.rollout.capacity.credits("eval") == 0
    await book.grant("g3")
    assert [group.group_id for group in book.released] == ["g3"]
    book.rollout.flush_finished()
    book.rollout.release_all()
    assert members_of(book.batches[0]) == [("g2", [0])]
    assert [group.group_id for group in book.released] == ["g3", "g2"]
    assert {("g3", "a1"), ("g2", "a1")} <= set(book.rollout.leases("train")), "on their way back, they are not lost"
    book.rollout.on_released(book.released)
    assert not {("g3", "a1"), ("g2", "a1")} & set(book.rollout.leases("train"))
    book.settle()
    assert book.rollout.idle.is_set()


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 2000), st.integers(0, 2000))
def test_credits_keep_the_line_full_and_short(slots: int, n: int, generating: int, undelivered: int) -> None:
    load = InFlight(generating=generating, undelivered=undelivered)
    groups = credits_for(load, slots=slots, n=n)
    after = generating + groups * n
    ahead = max(n, slots // 2)
    assert groups == 0 or after <= slots + ahead
    if undelivered <= 4 * slots:
        assert after > slots + ahead - n, "every slot can be refilled"
    else:
        assert groups == 0


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 2000), st.integers(1, 299))
def test_below_the_limit_of_the_engine_there_is_no_line(slots: int, n: int, generating: int, limit: int) -> None:
    groups = credits_for(InFlight(generating, 0), slots=slots, n=n, limit=limit)
    if limit >= slots:
        assert groups == credits_for(InFlight(generating, 0), slots=slots, n=n)
    else:
        assert groups == 0 or generating + groups * n <= max(limit, n)
        assert generating + groups * n > limit - n, "the limit is used, and one group is always possible"


async def test_an_engine_that_has_too_much_is_given_less() -> None:
    def status(**fields: Any) -> EngineStatus:
        return EngineStatus(**({"active": 8, "queued": 4, "tokens_generated": 0, "swaps": 0} | _SERVING | fields))

    book = Book()
    for name in ("g1", "g2", "g3"):
        await book.grant(name)
    loads = book.loads
    book.rollout.observe(status(preemptions=40, state="paused"), 0.0)
    assert (book.rollout.capacity.limit, book.loads) == (8, loads)
    book.rollout.observe(status(preemptions=40), 1.0)
    assert (book.rollout.capacity.limit, book.loads) == (7, loads + 1)
    book.finish(4)
    assert book.rollout.capacity.credits("train") == 0, "8 are outstanding"
    book.finish(4)
    assert book.rollout.capacity.credits("train") == 0, "8 would be outstanding"
    book.finish(4)
    assert book.rollout.capacity.credits("train") == book.rollout.capacity.credits("eval") // 4 == 1


async def test_who_waits_behind_pinned_groups_does_not_wait_for_room() -> None:
    book = Book()
    await book.grant("e1", table="eval", n=1, pin=V0)
    for at in range(60):
        book.rollout.observe(EngineStatus(active=1, queued=7, tokens_generated=0, swaps=0, **_SERVING), float(at))
    assert book.rollout.capacity.limit == 8


def test_what_the_gate_allows_is_shared() -> None:
    share = group_share(groups_per_step=8, max_staleness=0, replicas=2)
    assert share == 4
    assert credits_for(InFlight(0, 0), slots=64, n=8, share=share) == 4
    assert credits_for(InFlight(25, 0), slots=64, n=8, share=share) == 0
    assert credits_for(InFlight(24, 8), slots=64, n=8, share=share) == 1, "what is being scored does not count"
    assert group_share(groups_per_step=8, max_staleness=0, replicas=0) == 8


async def test_evaluation_has_credits_while_training_is_full() -> None:
    book = Book()
    for index in range(3):
        await book.grant(f"g{index}")
    assert book.rollout.capacity.credits("train") == 0
    assert book.rollout.capacity.credits("eval") == 12


async def test_the_last_members_are_greedy_where_the_task_says_so() -> None:
    book = Book()
    await book.grant("g1", n=5, greedy=2, members_done=[0, 3])
    drawn = [(request.sampling.temperature, request.sampling.top_k) for request in book.engine.requests]
    assert drawn == [(1.0, 7), (1.0, 7), (0.0, 0)], "members 1, 2 and 4"
    assert book.rollout.capacity.credits("train") == 2, "groups have five members now"


def test_each_attempt_at_each_member_draws_anew() -> None:
    """A group given to another holder, and one that replaces another, repeat no draws."""
    task = trajectory_pb2.PromptTask(n=4, sampling=trajectory_pb2.SamplingParams(max_tokens=4, seed=7))

    def seeds(**grant: Any) -> list[int]:
        group = ActiveGroup.from_grant("train", buffer_pb2.GroupGrant(group_id="g", task=task, **grant))
        return [group.request(member, "r").sampling.seed for member in range(4)]

    grants = ({"attempt": 1}, {"attempt": 2}, {"attempt": 1, "parent_group_id": "train-1"})
    found = [seed for grant in grants for seed in seeds(**grant)]
    assert len(set(found)) == 12
    assert min(found) > 0
    assert seeds(attempt=1) == found[:4], "whichever generator samples it"


def test_a_response_without_room_is_refused() -> None:
    with pytest.raises(PayloadError, match="max_tokens"):
        sampling_of(trajectory_pb2.SamplingParams(), seed=1)


_commands = st.one_of(
    st.tuples(st.just("grant"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(1, 6), st.sampled_from(["stop", "aborted"])),
    st.tuples(st.just("cancel"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("lost"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
    st.tuples(st.just("drain"), st.just(0), st.just(0)),
)


@given(st.lists(_commands, max_size=40))
def test_the_books_agree_whatever_happens(commands: list[tuple[str, int, Any]]) -> None:
    """Counts are those of a recount, and nothing of a group that is not held is handed on."""

    async def play() -> None:
        book = Book()
        for what, number, detail in commands:
            name = f"g{number}"
            match what:
                case "grant":
                    await book.grant(name, lease=f"a{detail}", n=3, members_done=[detail], drafts=[draft(0, 5)])
                case "finish":
                    book.finish(number, reason=detail)
                case "cancel":
                    held = book.rollout._groups.get(("train", name))
                    book.rollout.cancel("train", [lease(name, f"a{detail}")])
                    stale = held is not None and held.grant.lease_id != f"a{detail}"
                    assert not stale or book.rollout._groups[("train", name)] is held
                case "lost":
                    if (group := book.rollout._groups.get(("train", name))) is not None:
                        book.rollout.drop(group)
                case "settle":
                    book.settle()
                case "drain":
                    book.rollout.stop_admitting()
                    book.rollout.flush_finished()
                    book.rollout.release_all()
            check(book)

    def check(book: Book) -> None:
        rollout = book.rollout
        groups = list(rollout._groups.values())
        generating = {request_id for group in groups for request_id in group.generating.values()}
        assert set(rollout.unfinished("train")) == generating
        assert rollout.capacity.load.generating == len(generating)
        assert rollout.capacity.load.undelivered == sum(len(part) for batch in book.batches for _, part in batch)
        assert rollout.idle.is_set() == (not groups) == (not rollout.busy.is_set())
        assert not any(group.dropped for group in groups)
        waiting = {request.request_id for request in book.engine.requests} - set(book.engine.aborted)
        assert generating <= waiting

    asyncio.run(play())


async def test_a_group_at_which_the_engine_has_ended_fails_and_others_are_given_back() -> None:
    book = Book()
    await book.grant("first")
    await book.grant("again")
    book.rollout.add("train", grant("bad", lease="a1", n=3, attempt=2))
    await asyncio.sleep(0)
    alone = {request.request_id for request in book.engine.requests if request.alone}
    assert len(alone) == 3, "who had it before may have ended at it"
    book.finish(5)
    book.rollout.stop_admitting()
    book.rollout.fail_request(min(alone), "illegal instruction")
    book.rollout.flush_finished()
    [(group, members, reason)] = book.failed
    assert (group.group_id, members, reason) == ("bad", [0, 1, 2], "illegal instruction")
    book.settle()
    book.rollout.on_stored(group, 3)
    book.rollout.release_all()
    assert [group.group_id for group in book.released] == ["again"]
    assert book.rollout.active_groups == 0
