"""Rewards of steps, from an environment's turn to the advantages of that turn's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.generators.rollout.submission import TrajectorySubmitter
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.learner.algorithms.advantages.critic import gae
from rollmesh.learner.algorithms.advantages.group_relative import grpo
from rollmesh.learner.algorithms.types import Rollouts
from rollmesh.learner.batching.pack import token_rewards
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.mesh.trajectory.payload_codec import decode as decode_payload
from rollmesh.protos import buffer_pb2, trajectory_pb2
from rollmesh.reward_service.client.client import LocalScorer
from rollmesh.reward_service.function_spec import FunctionSpec
from rollmesh.reward_service.outcomes import RewardItem, Scored, SpanValue
from rollmesh.reward_service.scoring.engine import ScoringEngine
from tests.generators.agents.scene import HERE, TOKENIZER, Stage, encode


class _Codec(TokenizerCodec):
    """The codec of the tests' tokenizer: no folder holds it."""

    def __init__(self) -> None:
        self._tokenizer = TOKENIZER


class Buffer:
    """Keeps what is stored."""

    def __init__(self) -> None:
        self.writes: list[PendingWrite] = []

    def writer(self, _table: str) -> Buffer:
        return self

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        self.writes.extend(writes)
        return [WriteResult(buffer_pb2.WRITE_STATUS_STORED) for _ in writes]

    async def upload_side(self, *_: Any) -> trajectory_pb2.SideData:
        return trajectory_pb2.SideData()

    def on_stored(self, _group: ActiveGroup, members: int) -> None: ...

    def drop(self, group: ActiveGroup) -> None: ...


async def stored(function: FunctionSpec, *episodes: EpisodeResult) -> list[PendingWrite]:
    """The members of a group as a learner claims them, scored by a function."""
    task = trajectory_pb2.PromptTask(task_id="t", n=len(episodes), prompt_ids=np.array([3], "<i4").tobytes())
    group = ActiveGroup.from_grant("train", buffer_pb2.GroupGrant(group_id="g", lease_id="a", attempt=1, task=task))
    buffer, scorer = Buffer(), LocalScorer(ScoringEngine([function]))
    submitter = TrajectorySubmitter(
        generator_id="gen-1",
        run="run",
        text=_Codec(),
        scorer=scorer,
        store=buffer,  # type: ignore[arg-type]  # the parts of a store and of an owner that are called
        owner=buffer,
        on_error=lambda error: (_ for _ in ()).throw(error),
    )
    submitter.submit([(group, [FinishedMember(number, each, 99) for number, each in enumerate(episodes)])])
    await asyncio.wait_for(submitter.drained(), 120)
    await scorer.close()
    return sorted(buffer.writes, key=lambda write: write.head.meta.member)


def rollouts_of(writes: Sequence[PendingWrite]) -> Rollouts:
    """The batch that an estimator gets."""
    sequences = []
    for write in writes:
        found = decode_payload(write.payload)
        prompt: NDArray[np.int32] = np.array([3], np.int32)
        sequences.append(
            TrainSequence(
                prompt, found.response_ids, found.response_mask, found.log_probs, token_rewards=found.token_rewards
            )
        )
    masks = [sequence.response_mask != 0 for sequence in sequences]
    rewards = token_rewards(sequences, np.concatenate(masks))
    assert rewards is not None
    return Rollouts(
        group_ids=torch.zeros(len(writes), dtype=torch.int64),
        rewards=torch.tensor([write.head.meta.reward for write in writes]),
        lengths=torch.tensor([int(mask.sum()) for mask in masks]),
        behaviour_log_probs=torch.zeros(len(rewards)),
        staleness=torch.zeros(len(rewards), dtype=torch.int32),
        truncated=torch.zeros(len(writes), dtype=torch.bool),
        values=torch.zeros(len(rewards)),
        token_rewards=torch.from_numpy(rewards),
    )


async def countdown(*turns: str) -> EpisodeResult:
    stage = Stage(environment=f"{HERE}:Countdown")
    return await stage.play(*turns, request=stage.request(stage.task("Count.", start=len(turns))))


async def test_a_steps_reward_stands_at_its_turn_and_the_sum_stays_the_reward() -> None:
    # Both end with a reward of 2, and earn it at other turns.
    turns = ["3<eot>", "2<eot>", "no<eot>"], ["3<eot>", "no<eot>", "1<eot>"]
    writes = await stored("environment", *[await countdown(*own) for own in turns])
    assert [write.head.meta.reward for write in writes] == [2.0, 2.0]
    rollouts = rollouts_of(writes)
    to_go = zip([turn for own in turns for turn in own], [2.0, 1.0, 0.0, 2.0, 1.0, 1.0], strict=True)
    expected = [value for turn, value in to_go for _ in encode(turn)]
    assert gae(rollouts, gamma=1.0, lam=1.0, whiten=False).advantages.tolist() == expected
    assert not grpo(rollouts).any(), "their sums are equal"


async def test_a_function_rewards_parts_of_earlier_turns() -> None:
    def steps(items: Sequence[RewardItem]) -> list[Scored]:
        outcomes = []
        for item in items:
            assert (item.turn_count, item.response) == (3, "1")
            assert item.turns == ["3 so", "2", "1"]
            outcomes.append(
                Scored(1.0, spans=[SpanValue(0, 1, 0.5, turn=1), SpanValue(0, 0, 0.25, turn=2), (0, 1, 0.125)])
            )
        return outcomes

    steps.wants = "turns"  # type: ignore[attr-defined]
    episode = await countdown("3 so<eot>", "2<eot>", "1<eot>")
    (write,) = await stored(steps, episode)
    rewards = decode_payload(write.payload).token_rewards
    assert rewards is not None
    mask, sampled = episode.sampled.response_mask, episode.sampled.response_ids
    own = [
        (TOKENIZER.decode([token]), float(value))
        for token, value, bit in zip(sampled, rewards, mask, strict=True)
        if bit
    ]
    assert [(text.strip(), value) for text, value in own if value] == [("3", 0.5), ("<eot>", 0.25), ("1", 0.125)]
