"""Kept samples: the best and the worst of a step, with their groups and the values of their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from examples.demo.model import build_tokenizer
from rollmesh.learner.distributed.token_values import BatchTokens
from rollmesh.learner.metrics.sample_log import SampleLog
from rollmesh.mesh.config.run import LoggingSection
from tests.learner.dataflow import make_groups


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
