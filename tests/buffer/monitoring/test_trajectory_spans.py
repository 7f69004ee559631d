"""The buffer's part of the traces, where no run shows it: what is done already, drafts, and groups that end here."""

from __future__ import annotations

from rollmesh.buffer.monitoring.trajectory_spans import record_admissions, record_ends, record_writes
from rollmesh.buffer.store.records import EndedGroup, GroupGrant, Write, WriteOutcome
from rollmesh.protos import buffer_pb2 as pb
from tests.traced import KeptSpans


def test_an_attempt_is_admitted_for_the_members_that_are_missing() -> None:
    kept = KeptSpans()
    grant = GroupGrant("g", "l", 2, "p", "101", "", ())
    record_admissions(kept.tracer, "train", "generator-1", [grant], 5)
    (span,) = kept.spans
    assert (span.attributes["member"], span.attributes["attempt"], span.began_ns) == (1, 2, 5)


def test_a_draft_is_no_outcome() -> None:
    kept = KeptSpans()
    writes = [Write("g", "l", 1, 0, True, b"", "", b"", 9, draft=draft) for draft in (True, False)]
    record_writes(kept.tracer, "train", writes, [WriteOutcome(pb.WRITE_STATUS_STORED, sealed=True)] * 2, 5)
    (span,) = kept.spans
    assert span.attributes == {"status": "stored", "bytes": 9, "sealed": True}


def test_an_evicted_group_ends_all_its_trajectories() -> None:
    kept = KeptSpans()
    record_ends(kept.tracer, "train", "evicted_stale", [EndedGroup("g", 3, 4000, "over_bound")])
    assert [span.attributes["member"] for span in kept.spans] == [0, 1, 2]
    assert {span.parent_id for span in kept.spans} == {None}
    assert round((kept.spans[0].ended_ns - kept.spans[0].began_ns) / 1e9) == 4
    assert kept.spans[0].attributes["fate"] == "evicted_stale"


def test_a_group_that_fails_at_its_seal_ends_all_its_trajectories() -> None:
    kept = KeptSpans()
    failed = EndedGroup("g", 2, 4000, "too_few_scored")
    outcomes = [WriteOutcome(pb.WRITE_STATUS_STORED, sealed=True, failed=failed)]
    record_writes(kept.tracer, "train", [Write("g", "l", 1, 1, False, b"", "", b"", 0)], outcomes, 5)
    ends = [span for span in kept.spans if span.name == "trajectory"]
    told = [(span.attributes["member"], span.attributes["fate"], span.failure) for span in ends]
    assert told == [(0, "failed", "too_few_scored"), (1, "failed", "too_few_scored")]
    assert round((ends[0].ended_ns - ends[0].began_ns) / 1e9) == 4
