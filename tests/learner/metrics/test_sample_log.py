"""Kept samples: the best and the worst of a step, with their groups and the values of their tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from examples.demo.model import build_tokenizer
from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.distributed.token_values import BatchTokens
from rollmesh.learner.metrics.sample_log import SampleFetcher, SampleLog
from rollmesh.mesh.config.run import LoggingSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.payload_codec import encode
from rollmesh.mesh.trajectory.reward_record import RewardRecord
from rollmesh.protos import buffer_pb2
from tests.learner.dataflow import make_groups


class _Buffer:
    """Has tokens and one record of a reward."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = {group.group_id: group for group in groups}
        self.fetched: list[int] = []

    async def fetch(self, _table: str, refs: list[buffer_pb2.MemberRef]) -> AsyncIterator[bytes]:
        self.fetched.append(len(refs))
        for ref in refs:
            (member,) = (each for each in self._groups[ref.group_id].members if each.meta.member == ref.member)
            yield encode(member.trajectory)

    async def fetch_side(self, _table: str, group_id: str, member: int, entry: Any) -> bytes:
        if entry.digest == "gone":
            raise DataError("it is gone")
        return RewardRecord(f"{group_id}/{member}", cost=0.5, scorers={"judge": "1"}).to_bytes()


def _with_records(groups: list[Any], digest: str) -> list[Any]:
    for group in groups:
        for member in group.scored_members:
            member.meta.side.add(name="reward", bytes=1, digest=digest)
    return groups


async def test_what_is_missing_of_kept_responses_is_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", build_tokenizer(), LoggingSection(samples_per_step=3))
    for digest, fields in (("there", 3), ("gone", 0)):
        groups = _with_records(make_groups(), digest)
        buffer = _Buffer(groups)
        bare = [
            replace(group, members=[replace(member, trajectory=None) for member in group.members]) for group in groups
        ]
        filled = await SampleFetcher(cast(BufferClient, buffer), 3).fill(bare)
        kept = log.append(7, log.choose(filled, None), lambda version: 0)
        assert len(kept) == 3
        assert buffer.fetched == [3]
        assert sum(sample.get("evidence") == f"{sample['group']}/{sample['member']}" for sample in kept) == fields
        assert sum(sample.get("cost") == 0.5 and sample.get("scorers") == {"judge": "1"} for sample in kept) == fields
    assert "kept without its reward's evidence" in caplog.text
    whole = make_groups()
    assert await SampleFetcher(cast(BufferClient, _Buffer(whole)), 3).fill(whole) == whole


class _Advantages:
    """An advantage of 0.5 for each of the trained tokens."""

    def __init__(self, groups: list[Any]) -> None:
        self._trained = {
            (group.group_id, member.meta.member): int(member.trajectory.response_mask.sum())
            for group in groups
            for member in group.scored_members
        }

    def of(self, group_id: str, member: int) -> dict[str, Any]:
        return {"advantages": np.full(self._trained[group_id, member], 0.5, np.float32)}


@pytest.mark.parametrize("tokens", [100, 0])
def test_a_step_leaves_its_range(tmp_path: Path, tokens: int) -> None:
    groups = make_groups()
    section = LoggingSection(samples_per_step=3, tokens_per_sample=tokens)
    log = SampleLog(tmp_path / "samples.jsonl", build_tokenizer(), section)
    chosen = log.choose(groups, cast(BatchTokens, _Advantages(groups)))
    kept = log.append(7, chosen, lambda version: 10 - version.version)
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == kept
    rewards = sorted(member.meta.reward for group in groups for member in group.scored_members)
    assert [kept[0]["reward"], kept[-1]["reward"]] == [rewards[0], rewards[-1]]
    for sample in kept:
        assert [sample["member"], sample["reward"]] in sample["members"]
        assert len(sample["members"]) == 3
        assert ("tokens" in sample) == bool(tokens)
        if tokens:
            assert sample["tokens"]["count"] == sum(length for length, *_ in sample["versions"])
            assert {"characters", "mask", "staleness", "log_probs", "advantages"} <= set(sample["tokens"])
