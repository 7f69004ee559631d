"""Delivery: typed outcomes, rejected and superseded writes, a buffer that is gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.buffer.protocol.limits import META_BYTES
from rollmesh.generators.engines.types import GenerationResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.generators.rollout.submission import TrajectorySubmitter
from rollmesh.mesh.errors import PayloadError, RollmeshError, UnreachableError
from rollmesh.mesh.trajectory.content_key import content_key
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, reward_pb2, trajectory_pb2
from rollmesh.reward_service.client.outgoing import ItemDetails

Score = Callable[[reward_pb2.ScoreItem], reward_pb2.ScoreResult]
Answer = Callable[[PendingWrite], WriteResult]


class Surroundings:
    """Scorer, writer and rollout loop in one."""

    def __init__(self, score: Score, answer: Answer | None = None) -> None:
        self.score_item = score
        self.answer = answer or (lambda write: WriteResult(buffer_pb2.WRITE_STATUS_STORED))
        self.writes: list[PendingWrite] = []
        self.uploads: list[tuple[str, str, int, str, int]] = []
        self.records: list[dict[str, Any]] = []
        self.details: Sequence[ItemDetails] = ()
        self.calls = 0
        self.members_settled = 0
        self.dropped: list[ActiveGroup] = []
        self.errors: list[RollmeshError] = []
        self.submitter = TrajectorySubmitter(
            generator_id="gen-1",
            run="a run",
            text=self,
            scorer=self,  # type: ignore[arg-type]  # scores below
            store=self,
            owner=self,
            on_error=self.errors.append,
        )

    def decode(self, responses: Sequence[np.ndarray]) -> list[str]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return ["-".join(map(str, ids)) for ids in responses]

    def token_ends(self, ids: NDArray[np.int32], text: str) -> list[int]:
        """As `decode` writes them: a dash belongs to the token after it."""
        return list(accumulate(len(str(number)) + (place > 0) for place, number in enumerate(ids)))

    scorers: Mapping[str, str] = {"sums": "3"}

    async def score(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        *,
        timeout_s: float | None = None,
        details: Sequence[ItemDetails] | None = None,
    ) -> list[reward_pb2.ScoreResult]:
        assert details is not None
        self.details = details
        self.calls += 1
        return [self.score_item(item) for item in items]

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        self.writes.extend(writes)
        return [self.answer(write) for write in writes]

    def writer(self, _table: str) -> Surroundings:
        return self

    async def upload_side(
        self, table: str, grant: buffer_pb2.GroupGrant, member: int, name: str, data: bytes | NDArray[np.generic]
    ) -> trajectory_pb2.SideData:
        """Takes everything but floats; `len(self.writes)` tells what was written before."""
        self.uploads.append((table, grant.lease_id, member, name, len(self.writes)))
        if isinstance(data, bytes):
            self.records.append(json.loads(data))
            return trajectory_pb2.SideData(name=name, bytes=len(data))
        if data.dtype == np.float64:
            raise PayloadError("dtype", "float64")
        return trajectory_pb2.SideData(name=name, bytes=data.nbytes, dtype=data.dtype.name, shape=data.shape)

    def on_stored(self, _group: ActiveGroup, members: int) -> None:
        self.members_settled += members

    def drop(self, group: ActiveGroup) -> None:
        self.dropped.append(group)


def held(name: str, table: str = "train") -> ActiveGroup:
    task = trajectory_pb2.PromptTask(task_id=name, n=2, prompt_ids=np.array([3, 4, 5], "<i4").tobytes())
    task.prompt_text, task.data_source, task.ground_truth_json = "1+1=", "sums", '"2"'
    return ActiveGroup.from_grant(table, buffer_pb2.GroupGrant(group_id=name, lease_id="a1", attempt=3, task=task))


def finished(member: int, *tokens: int) -> FinishedMember:
    runs = VersionRuns(((len(tokens) - 1, PolicyVersion(1, 4)), (1, PolicyVersion(1, 5))) if tokens else ())
    ids = np.array(tokens, np.int32)
    return FinishedMember(
        member,
        GenerationResult("r", Trajectory.sampled(ids, np.full(len(tokens), -0.5, np.float32), runs), "length"),
        99,
    )


def scored(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    return reward_pb2.ScoreResult(
        item_id=item.item_id, scored=reward_pb2.Scored(total=1.5, components={"sums": 1.0, "length": 0.5}, answer="2")
    )


async def test_outcomes_keep_their_type() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        match item.response[0]:
            case "6":
                return scored(item)
            case "7":
                return reward_pb2.ScoreResult(unscorable=reward_pb2.Unscorable(reason="two right answers"))
            case _:
                return reward_pb2.ScoreResult(error=reward_pb2.Error(code="timeout", message="10 s", retryable=True))

    around = Surroundings(score)
    groups = [held("g1"), held("g2")]
    around.submitter.submit([(groups[0], [finished(0, 6, 1), finished(1, 7, 1)]), (groups[1], [finished(1, 8, 1)])])
    await around.submitter.drained()
    assert around.calls == 1, "several groups travel in one call"
    first, second, third = around.writes
    assert first.head.meta.outcome == trajectory_pb2.OUTCOME_SCORED
    assert first.head.meta.reward == 1.5
    assert dict(first.head.meta.components) == {"sums": 1.0, "length": 0.5}
    assert (first.head.meta.answer, second.head.meta.HasField("answer")) == ("2", False)
    assert (first.head.meta.oldest.version, first.head.meta.newest.version) == (4, 5)
    assert first.head.meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    assert (first.head.meta.prompt_tokens, first.head.meta.response_tokens, first.head.meta.finished_unix_ns) == (
        3,
        2,
        99,
    )
    assert (first.head.lease_id, first.head.attempt) == ("a1", 3)
    assert decode(first.payload).response_ids.tolist() == [6, 1]
    assert second.head.meta.outcome == trajectory_pb2.OUTCOME_UNSCORABLE
    assert second.head.meta.reason == "two right answers"
    assert third.head.meta.outcome == trajectory_pb2.OUTCOME_ERROR
    assert third.head.meta.reason == "reward timeout: 10 s"
    assert second.payload == third.payload == b""
    assert (around.submitter.scored, around.submitter.unscorable, around.submitter.failed) == (1, 1, 1)
    assert around.members_settled == 3


async def test_a_held_out_response_without_a_score_keeps_its_end() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        if item.response[0] == "6":
            return reward_pb2.ScoreResult(error=reward_pb2.Error(code="user_error", message="division by zero"))
        return scored(item) if item.response[0] == "8" else reward_pb2.ScoreResult(unscorable=reward_pb2.Unscorable())

    for table, kept in (("eval", [[6, 1], [], [7, *[1] * 1499]]), ("train", [[], [], []])):
        around = Surroundings(score)
        answers = [finished(0, 6, 1), finished(1, 8, 1), finished(2, *[5] * 9, 7, *[1] * 1499)]
        around.submitter.submit([(held("g1", table), answers)])
        await around.submitter.drained()
        assert [list(write.head.meta.unscored_ids) for write in around.writes] == kept
        assert all(len(write.head.meta.SerializeToString()) < META_BYTES for write in around.writes)


async def test_members_that_fail_together_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        return reward_pb2.ScoreResult(error=reward_pb2.Error(code="timeout", message=item.item_id))

    around = Surroundings(score)
    refused = replace(finished(0).result, refusal="illegal instruction")
    around.submitter.submit(
        [
            (held("g1"), [FinishedMember(member, refused, 99) for member in range(4)]),
            (held("g2"), [finished(member, 6, 1) for member in range(3)]),
        ]
    )
    await around.submitter.drained()
    assert [record.getMessage() for record in caplog.records] == [
        "4 members of group g1 have no response: generation refused: illegal instruction",
        "3 members of group g2 could not be scored: reward timeout: g2/3/0",
    ]
    assert len(around.writes) == around.members_settled == around.submitter.failed == 7


async def test_a_score_item_says_what_the_contract_asks_for() -> None:
    seen: list[reward_pb2.ScoreItem] = []

    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        seen.append(item)
        return scored(item)

    around = Surroundings(score)
    around.submitter.submit([(held("g1"), [finished(0, 6, 1), finished(1, 7, 1)])])
    await around.submitter.drained()
    assert len({item.item_id for item in seen}) == 2
    item = seen[0]
    assert (item.group_id, item.data_source, item.prompt, item.ground_truth_json) == ("g1", "sums", "1+1=", '"2"')
    assert (item.response, list(item.response_ids)) == ("6-1", [6, 1])
    assert (item.run, item.trajectory_id, item.attempt) == ("a run", "g1/3/0", 3)
    assert (item.policy_version, item.finish_reason, list(item.spans)) == (5, "length", [])
    assert item.content_key == content_key(item) != seen[1].content_key
    assert not item.messages_json
    assert not item.token_ends
    assert json.loads(around.details[0].messages_json()) == [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "6-1"},
    ]
    assert around.details[0].token_ends() == [1, 3]


async def test_images_are_named_and_not_sent() -> None:
    seen: list[reward_pb2.ScoreItem] = []

    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        seen.append(item)
        return scored(item)

    around = Surroundings(score)
    task = held("g1").grant.task
    task.images.append(b"a picture")
    task.image_digests.append("ab" * 16)
    grant = buffer_pb2.GroupGrant(group_id="g1", lease_id="a1", attempt=1, task=task)
    around.submitter.submit([(ActiveGroup.from_grant("train", grant), [finished(0, 6, 1)])])
    await around.submitter.drained()
    (image,) = seen[0].images
    assert image.uri == f"images/ab/{'ab' * 16}"
    assert image.sha256 == hashlib.sha256(b"a picture").digest()


async def test_rewards_of_tokens_and_of_parts_travel_with_the_tokens() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        reward = reward_pb2.Scored(total=1.0)
        if item.item_id.endswith("/0"):
            reward.per_token.extend([0.5, -1.0])
        elif item.item_id.endswith("/1"):
            reward.spans.add(begin=0, end=1, value=0.25)
            reward.spans.add(begin=1, end=3, value=0.75)
        return reward_pb2.ScoreResult(item_id=item.item_id, scored=reward)

    around = Surroundings(score)
    around.submitter.submit([(held("g1"), [finished(member, 6, 1) for member in range(3)])])
    await around.submitter.drained()
    found = [decode(write.payload).token_rewards for write in around.writes]
    assert [None if rewards is None else rewards.tolist() for rewards in found] == [[0.5, -1.0], [0.25, 0.75], None]
    assert [write.head.meta.reward for write in around.writes] == [1.0] * 3


async def test_what_a_score_says_besides_its_numbers_is_side_data() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        result = scored(item)
        if item.item_id.endswith("/0"):
            result.scored.evidence, result.scored.cost, result.scored.cached = "because", 0.5, True
        return result

    around = Surroundings(score)
    around.submitter.submit([(held("g1"), [finished(0, 6, 1), finished(1, 6, 1)])])
    await around.submitter.drained()
    assert [[entry.name for entry in write.head.meta.side] for write in around.writes] == [["reward"], []]
    assert around.records == [{"evidence": "because", "cost": 0.5, "cached": True, "scorers": {"sums": "3"}}]


async def test_evidence_of_any_server_is_bounded_text() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        result = scored(item)
        result.scored.evidence = "\x1b[2J" + "x" * 100_000
        return result

    around = Surroundings(score)
    around.submitter.submit([(held("g1"), [finished(0, 6, 1)])])
    await around.submitter.drained()
    (record,) = around.records
    assert len(record["evidence"]) == 8000
    assert "\x1b" not in record["evidence"]


async def test_superseded_work_is_dropped() -> None:
    around = Surroundings(scored, lambda write: WriteResult(buffer_pb2.WRITE_STATUS_SUPERSEDED))
    group = held("g1")
    around.submitter.submit([(group, [finished(0, 6, 1)])])
    await around.submitter.drained()
    assert around.dropped == [group]
    assert around.submitter.superseded == around.members_settled == 1


async def test_nothing_is_written_of_a_group_that_was_cancelled_while_it_was_scored() -> None:
    groups = [held("g1"), held("g2")]

    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        groups[0].dropped = True
        return scored(item)

    around = Surroundings(score)
    around.submitter.submit([(group, [finished(0, 6, 1)]) for group in groups])
    await around.submitter.drained()
    assert [write.head.group_id for write in around.writes] == ["g2"]
    assert around.members_settled == 2
    assert (around.submitter.scored, around.submitter.superseded) == (1, 1)


async def test_a_rejected_member_ends_as_an_error() -> None:
    def answer(write: PendingWrite) -> WriteResult:
        if write.head.meta.outcome == trajectory_pb2.OUTCOME_SCORED:
            return WriteResult(buffer_pb2.WRITE_STATUS_REJECTED, field="payload.magic", message="expected RMT1")
        return WriteResult(buffer_pb2.WRITE_STATUS_STORED)

    around = Surroundings(scored, answer)
    around.submitter.submit([(held("g1"), [finished(0, 6, 1)])])
    await around.submitter.drained()
    assert len(around.writes) == 2
    assert around.writes[1].head.meta.outcome == trajectory_pb2.OUTCOME_ERROR
    assert "payload.magic" in around.writes[1].head.meta.reason
    assert around.members_settled == 1


async def test_a_buffer_that_is_gone_is_told_once_per_delivery() -> None:
    around = Surroundings(scored)

    async def unreachable(writes: Sequence[PendingWrite]) -> list[WriteResult]:
        raise UnreachableError("writing (train): gone")

    around.write = unreachable  # type: ignore[method-assign]
    around.submitter.submit([(held("g1"), [finished(0, 6, 1)])])
    await around.submitter.drained()
    await asyncio.sleep(0)
    assert [type(error) for error in around.errors] == [UnreachableError]
    assert around.members_settled == 0


def episode(member: int, *tokens: int, mask: NDArray[np.uint8] | None = None, **fields: object) -> FinishedMember:
    sampled = finished(member, *tokens).result.sampled if tokens else Trajectory.empty()
    result = EpisodeResult(
        request_id="r",
        sampled=sampled if mask is None else replace(sampled, response_mask=mask),
        finish_reason="stop",
        **fields,  # type: ignore[arg-type]  # test shorthand
    )
    return FinishedMember(member, result, 99)


async def test_an_episode_says_what_it_was_worth() -> None:
    """Rewards see its last words, its conversation and its environment's word, in addition to what the dataset has."""
    seen: list[reward_pb2.ScoreItem] = []

    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        seen.append(item)
        return scored(item)

    around = Surroundings(score)
    group = held("g1")
    group.grant.task.extra_info_json = '{"index": 7}'
    talk = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    mask = np.array([1, 0, 1], np.uint8)
    first = episode(0, 6, 8, 1, rewards={"won": 1.0, "turns": -0.25}, final_text="2", messages=talk, mask=mask)
    around.submitter.submit([(group, [first, episode(1, 6, 1), finished(1, 6, 1)])])
    await around.submitter.drained()
    assert [item.response for item in seen] == ["2", "6-1", "6-1"]
    # An answer that is not the text of the last turn belongs to the last token.
    assert [list(own.token_ends()) for own in around.details] == [[0, 0, 1], [1, 3], [1, 3]]
    assert json.loads(around.details[0].messages_json()) == list(talk)
    assert json.loads(seen[0].extra_info_json) == {
        "index": 7,
        "messages": list(talk),
        "environment_reward": {"won": 1.0, "turns": -0.25},
    }
    assert json.loads(seen[1].extra_info_json) == json.loads(seen[2].extra_info_json) == {"index": 7}
    assert decode(around.writes[0].payload).response_mask.tolist() == mask.tolist()
    assert decode(around.writes[1].payload).response_mask.tolist() == [1, 1]


async def test_an_episode_that_failed_is_an_error_and_never_scored() -> None:
    around = Surroundings(scored)
    around.submitter.submit(
        [(held("g1"), [episode(0, 6, 1, failure="the server is gone", rewards={"won": 0.0}), episode(1)])]
    )
    await around.submitter.drained()
    assert around.calls == 0
    assert [write.head.meta.outcome for write in around.writes] == [trajectory_pb2.OUTCOME_ERROR] * 2
    assert [write.head.meta.reason for write in around.writes] == [
        "episode failed: the server is gone",
        "generation ended without a token",
    ]
    assert (around.submitter.failed, around.members_settled) == (2, 2)


async def test_the_experts_of_a_prompt_are_stored_with_one_member_of_its_group() -> None:
    around = Surroundings(scored)
    members = [
        FinishedMember(n, replace(finished(n, 6, 1).result, side={"routed_experts": np.zeros((4, 2, 2), np.uint8)}), 99)
        for n in range(2)
    ]
    around.submitter.submit([(held("g1"), members)])
    await around.submitter.drained()
    names = [[entry.name for entry in write.head.meta.side] for write in around.writes]
    assert sorted(names, key=len) == [["routed_experts"], ["routed_experts", "prompt_experts"]]


async def test_side_data_is_stored_before_the_member_that_names_it() -> None:
    around = Surroundings(scored)
    experts = np.zeros((4, 2, 2), np.uint8)
    experts[3:] = 1
    whole = finished(0, 6, 1)
    side = {"routed_experts": experts, "odd": np.zeros(3)}
    with_side = FinishedMember(0, replace(whole.result, side=side), 99)
    around.submitter.submit([(held("g1"), [with_side, finished(1, 7, 1)])])
    await around.submitter.drained()
    assert [name for *_, name, _ in around.uploads] == ["routed_experts", "prompt_experts", "odd"]
    stored = {entry.name: (entry.dtype, list(entry.shape)) for entry in around.writes[0].head.meta.side}
    assert stored == {"routed_experts": ("uint8", [1, 2, 2]), "prompt_experts": ("uint8", [3, 2, 2])}
    assert around.writes[0].head.meta.outcome == trajectory_pb2.OUTCOME_SCORED, "what is refused is left out"
    assert not around.writes[1].head.meta.side
    assert around.members_settled == 2


async def test_it_says_how_many_responses_wait_for_their_reward_and_for_how_long() -> None:
    around = Surroundings(scored)
    seen: list[tuple[int, float]] = []

    def look(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        seen.append(around.submitter.waiting_for_rewards())
        return scored(item)

    around.score_item = look
    around.submitter.submit([(held("a"), [finished(0, 1, 2), finished(1, 3, 4)])])
    await around.submitter.drained()
    assert [members for members, _ in seen] == [2, 2]
    assert seen[0][1] <= seen[1][1]
    assert around.submitter.waiting_for_rewards() == (0, 0.0)


async def test_side_data_of_members_travels_together() -> None:
    around, both = Surroundings(scored), asyncio.Barrier(2)
    upload = around.upload_side

    async def meeting(*arguments: Any) -> trajectory_pb2.SideData:
        async with asyncio.timeout(180):
            await both.wait()
        return await upload(*arguments)

    around.upload_side = meeting  # type: ignore[method-assign]
    members = [
        FinishedMember(member, replace(finished(member, 6, 1).result, side={"experts": np.zeros(3, np.uint8)}), 99)
        for member in range(2)
    ]
    around.submitter.submit([(held("g1"), members)])
    await around.submitter.drained()
    assert [[entry.name for entry in write.head.meta.side] for write in around.writes] == [["experts"]] * 2


async def test_a_reward_that_comes_later_holds_up_no_other_member() -> None:
    there = False
    asked: list[str] = []

    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        asked.append(item.response)
        if item.response == "1" or there:
            return scored(item)
        error = reward_pb2.Error(code="pending", message="job", retryable=True, retry_after_ms=1)
        return reward_pb2.ScoreResult(item_id=item.item_id, error=error)

    around = Surroundings(score)
    group = held("g")
    around.submitter.submit([(group, [finished(0, 1), finished(1, 2)])])
    async with asyncio.timeout(60):
        while len(asked) < 4 or not around.writes:
            await asyncio.sleep(0.001)
    assert [write.head.meta.member for write in around.writes] == [0]
    assert around.submitter.waiting_for_rewards()[0] == 1
    there = True
    async with asyncio.timeout(60):
        await around.submitter.drained()
    assert [write.head.meta.member for write in around.writes] == [0, 1]
    assert asked.count("1") == 1
    assert (around.submitter.scored, around.members_settled) == (2, 2)


async def test_a_promise_that_is_not_kept_ends_as_late() -> None:
    def score(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        error = reward_pb2.Error(code="pending", message="job", retryable=True)
        return reward_pb2.ScoreResult(item_id=item.item_id, error=error)

    around = Surroundings(score)
    around.submitter._late_s = 0.0
    around.submitter.submit([(held("g"), [finished(0, 1)])])
    async with asyncio.timeout(60):
        await around.submitter.drained()
    (write,) = around.writes
    assert write.head.meta.reason == "reward late: the reward that was promised has not come: job"
