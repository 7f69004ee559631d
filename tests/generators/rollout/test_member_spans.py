"""A generator's part of the traces: versions and tools of a response, outcomes, and the arrival of weights."""

from __future__ import annotations

from rollmesh.buffer.client.client import WriteResult
from rollmesh.generators.rollout.active_group import FinishedMember
from rollmesh.generators.rollout.encoding import member_write
from rollmesh.generators.rollout.member_spans import MemberSpans
from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2, weights_pb2
from tests.generators.rollout.test_submission import finished, held
from tests.traced import KeptSpans

MS = 1_000_000


def test_a_response_shows_its_versions_and_its_tools() -> None:
    kept = KeptSpans()
    spans, group = MemberSpans(kept.tracer), held("g")
    group.begun_ns = 1
    report = weights_pb2.SwapReport(
        member_id="gen-1", policy=PolicyVersion(1, 5).to_proto(), first_byte_us=10, last_byte_us=20, total_us=30
    )
    spans.weights_came(report)
    (receive,) = kept.spans
    assert [(event.name, event.at_ns - receive.began_ns) for event in receive.events] == [
        ("first_byte", 10_000),
        ("last_byte", 20_000),
    ]
    plain = finished(1, 6, 7, 8).result
    episode = EpisodeResult("r", plain.sampled, "stop", tool_calls=((5 * MS, 0.25, "result"),))
    meta = trajectory_pb2.MemberMeta(member=1, outcome=trajectory_pb2.OUTCOME_SCORED, reward=1.5, response_tokens=3)
    spans.scored(group, FinishedMember(1, episode, 9 * MS), meta, asked_ns=10 * MS)
    found = kept.of("g", 1)
    (generate,) = found["generate"]
    assert (generate.began_ns, generate.ended_ns) == (1, 9 * MS)
    assert [(event.name, event.at_ns) for event in generate.events] == [
        ("weights", 1),
        ("tool_call", 5 * MS),
        ("weights", receive.ended_ns),
    ]
    assert found["reward"][0].attributes == {"outcome": "scored", "reward": 1.5}
    meta.outcome, meta.reason = trajectory_pb2.OUTCOME_ERROR, "reward reward_timeout: none in 5 s"
    spans.scored(group, FinishedMember(1, episode, 9 * MS), meta, asked_ns=10 * MS)
    assert kept.of("g", 1)["reward"][1].failure == meta.reason


def test_writes_and_failures_end_with_their_reason() -> None:
    kept = KeptSpans()
    spans, group = MemberSpans(kept.tracer), held("g")
    spans.failed(group, 0, "generation refused: too long")
    assert kept.of("g", 0)["generate"][0].failure == "generation refused: too long"
    write = member_write(group, trajectory_pb2.MemberMeta(member=1), b"")
    spans.written([(group, write)], [WriteResult(buffer_pb2.WRITE_STATUS_SUPERSEDED)], 5)
    (written,) = kept.of("g", 1)["write"]
    assert written.attributes == {"status": "superseded"}
    assert not written.failure
    refused = weights_pb2.SwapReport(policy=PolicyVersion(1, 6).to_proto(), error="bucket 0 is damaged")
    spans.weights_came(refused)
    assert kept.spans[-1].failure == "bucket 0 is damaged"
