"""Records of a step and the totals of a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rollmesh.learner.metrics.run_totals import RunTotals, write_learner_json
from rollmesh.learner.metrics.step_metrics import group_metrics, staleness_histogram, staleness_metrics
from rollmesh.learner.rollouts.group import SampledGroup, decode_group
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, trajectory_pb2


def leased(rewards: list[float | None], versions: list[PolicyVersion]) -> tuple[buffer_pb2.LeasedGroup, list[bytes]]:
    """A group whose members have one token per version; None: not scored."""
    count = len(versions)
    payload = encode(
        Trajectory(
            np.arange(count, dtype=np.int32),
            np.zeros(count, dtype=np.float32),
            np.ones(count, dtype=np.uint8),
            VersionRuns.merged((1, version) for version in versions),
        )
    )
    members = [
        trajectory_pb2.MemberMeta(
            member=index,
            outcome=trajectory_pb2.OUTCOME_ERROR if reward is None else trajectory_pb2.OUTCOME_SCORED,
            reward=reward or 0.0,
            components={"match": reward} if reward is not None else {},
            response_tokens=count,
            prompt_tokens=2,
            finish_reason=trajectory_pb2.FINISH_REASON_LENGTH,
            oldest=versions[0].to_proto(),
        )
        for index, reward in enumerate(rewards)
    ]
    task = trajectory_pb2.PromptTask(prompt_ids=np.zeros(2, dtype="<i4").tobytes())
    payloads = [b"" if reward is None else payload for reward in rewards]
    group = buffer_pb2.LeasedGroup(group_id="g", lease_id="l", task=task, members=members, attempt=1, generating_ms=500)
    return group, payloads


def group(rewards: list[float | None], versions: list[PolicyVersion], *, payloads: bool = True) -> SampledGroup:
    found, stored = leased(rewards, versions)
    return decode_group(found, stored if payloads else None)


V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)


def test_group_metrics_leave_out_what_is_not_scored() -> None:
    metrics = group_metrics([group([1.0, 0.0, None], [V3, V4]), group([1.0, 1.0], [V3])])
    assert metrics["critic/score/mean"] == 0.75
    assert metrics["rewards/match/mean"] == 0.75
    assert metrics["rewards/match/std"] == pytest.approx(0.5)
    assert metrics["reward_std"] == pytest.approx((0.5**0.5 + 0.0) / 2)
    assert (metrics["samples"], metrics["unscored_members"], metrics["frac_reward_zero_std"]) == (4, 1, 0.5)
    assert (metrics["response_length/mean"], metrics["response_length/min"]) == (1.5, 1)
    assert metrics["response_length/clip_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in metrics, "the budget ended all of them"
    assert metrics["perf/total_num_tokens"] == 6 + 8
    assert metrics["delay/generating_s"] == 0.5


def test_group_metrics_say_why_members_have_no_reward() -> None:
    found = group([1.0, None, None, None, None], [V3])
    error, unscorable = trajectory_pb2.OUTCOME_ERROR, trajectory_pb2.OUTCOME_UNSCORABLE
    told = [
        (error, "reward timeout: no answer in 8 s", 30),
        (error, "reward timeout: no answer in 9 s", 50),
        (unscorable, "no such test: 7", 40),
        (error, "", 0),
    ]
    for member, (outcome, reason, finished) in zip(found.members[1:], told, strict=True):
        meta = member.meta
        meta.outcome, meta.reason, meta.finished_unix_ns = outcome, reason, finished
    metrics = group_metrics([found])
    assert {name: value for name, value in metrics.items() if name.startswith("unscored")} == {
        "unscored_members": 4,
        "unscored/reward_timeout": 2,
        "unscored/unscorable": 1,
        "unscored/unknown": 1,
        "unscored_cause": "reward timeout: no answer in 9 s",
    }


@pytest.mark.parametrize(("payloads", "expected"), [(True, {2: 2, 1: 2}), (False, {2: 4})])
def test_staleness_counts_tokens(payloads: bool, expected: dict[int, int]) -> None:
    histogram = staleness_histogram([group([1.0, 0.0], [V3, V4], payloads=payloads)], Lineage(((1, 0),)), 5)
    assert histogram == expected
    assert staleness_metrics(histogram)["staleness/max"] == 2


def test_staleness_across_learners_counts_the_way_through_the_common_ancestor() -> None:
    lineage = Lineage(((1, 0),)).with_takeover(2, 4).with_takeover(3, 6)
    assert lineage.staleness(PolicyVersion(1, 3), 7) == 4
    assert lineage.staleness(PolicyVersion(1, 6), 7) == (6 - 4) + (7 - 4)
    assert lineage.staleness(PolicyVersion(2, 8), 7) == (8 - 6) + (7 - 6)
    assert lineage.staleness(PolicyVersion(3, 6), 7) == 1
    runs = VersionRuns(((2, PolicyVersion(1, 3)), (1, PolicyVersion(3, 6))))
    assert np.asarray(lineage.per_token(runs, 7)).tolist() == [4, 4, 1]
    assert lineage.per_token(VersionRuns(((2, PolicyVersion(3, 7)),)), 7) == 0
    assert Lineage.from_wire(lineage.to_wire()) == lineage
    assert lineage.with_takeover(3, 5).resumed == ((1, 0), (2, 4), (3, 5))


def test_a_group_that_contradicts_itself_is_refused() -> None:
    wrong_length, stored = leased([1.0], [V3, V4])
    wrong_length.members[0].response_tokens = 9
    with pytest.raises(PayloadError, match="response_tokens"):
        decode_group(wrong_length, stored)
    with pytest.raises(PayloadError, match="no scored member"):
        group([None], [V3])
    short, (payload,) = leased([1.0], [V3])
    with pytest.raises(PayloadError, match="payload"):
        decode_group(short, [payload[:-1]])
    with pytest.raises(PayloadError, match="0 for 1 members"):
        decode_group(short, [])


def test_totals_survive_a_checkpoint_and_end_in_learner_json(tmp_path: Path) -> None:
    run_totals = RunTotals()
    run_totals.add_step(groups=2, samples=4, tokens=10, staleness=Counter({0: 4, 2: 6}), wait_s=0.5)
    run_totals.evals.append({"version": 0, "reward": 0.25})
    again = RunTotals.from_wire(json.loads(json.dumps(run_totals.to_wire())))
    again.add_step(groups=1, samples=1, tokens=1, staleness=Counter({2: 1}), wait_s=0.25)
    write_learner_json(
        tmp_path / "learner.json",
        again,
        incarnation=2,
        version=2,
        stop_reason="steps",
        pushes=PushStatistics().summary(),
        receivers=PushStatistics().receivers(),
        waiting={"inserts_s": 1.0},
        refused_prompts={"long_prompt": 3},
    )
    written = json.loads((tmp_path / "learner.json").read_text())
    assert (written["steps"], written["tokens_trained"]) == (2, 11)
    assert written["staleness_tokens"] == {"0": 4, "2": 7}
    assert written["eval_first"] == {"version": 0, "reward": 0.25}
    assert written["waiting"] == {"inserts_s": 1.0, "learner_s": 0.75}
    assert written["peak_rss_bytes"] > 1 << 20
