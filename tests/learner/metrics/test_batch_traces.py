"""The learner's part of the traces: batches that are trained, used again, refused, and dropped."""

from __future__ import annotations

import time

from rollmesh.learner.metrics.batch_traces import BatchTraces
from rollmesh.mesh.telemetry.trace_ids import version_trace
from rollmesh.mesh.telemetry.tracing import no_traces
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.dataflow import make_groups
from tests.traced import RUN, KeptSpans

TIMINGS = {
    "timing_s/gen": 2.0,
    "timing_s/prepare": 0.1,
    "timing_s/update_actor": 1.0,
    "timing_s/claim": 0.2,
    "timing_s/update_weights": 0.5,
}


def test_a_batch_is_claimed_trained_and_committed() -> None:
    kept, groups = KeptSpans(), make_groups(groups=2)
    traces = BatchTraces(kept.tracer, incarnation=3)
    for group in groups:
        group.leased.use = 1
    traces.claimed(7, groups, time.time_ns())
    traces.trained(7, groups, TIMINGS)
    traces.published(PolicyVersion(3, 8), time.time_ns())
    traces.committed(7)
    member = groups[0].scored_members[0].meta
    assert kept.of(groups[0].group_id, member.member).keys() == {"claim", "train"}, (
        "version 7 itself is not durable yet"
    )
    traces.committed(8)
    traces.committed(9)
    spans = kept.of(groups[0].group_id, member.member)
    once = ("claim", "train", "commit", "trajectory")
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(once, 1)
    assert spans["trajectory"][0].attributes["fate"] == "trained"
    assert spans["trajectory"][0].attributes["reward"] == member.reward
    step = version_trace(RUN, PolicyVersion(3, 8))
    phases = {span.name: span for span in kept.spans if span.trace_id == step}
    assert spans["train"][0].link == (step, phases["step"].span_id)
    assert phases["gather"].ended_ns == phases["prepare"].began_ns
    assert phases["claim"].ended_ns == phases["copy weights"].began_ns
    assert {span.parent_id for name, span in phases.items() if name != "step"} == {phases["step"].span_id}
    assert round((phases["step"].ended_ns - phases["step"].began_ns) / 1e9, 1) == 3.8


def test_a_group_that_is_used_again_ends_once() -> None:
    kept, groups = KeptSpans(), make_groups(groups=1)
    traces = BatchTraces(kept.tracer, incarnation=1)
    for use, version in ((1, 0), (2, 1)):
        groups[0].leased.use = use
        traces.claimed(version, groups, time.time_ns())
        traces.committed(version + 1)
    spans = kept.of(groups[0].group_id, groups[0].scored_members[0].meta.member)
    assert len({span.span_id for span in spans["commit"]}) == 2
    assert len(spans["trajectory"]) == 1


def test_a_dropped_group_has_its_fate() -> None:
    kept, groups = KeptSpans(), make_groups(groups=2)
    traces = BatchTraces(kept.tracer, incarnation=1)
    traces.dropped(groups[:1], "filtered", "zero_variance")
    traces.dropped(groups[1:], "failed", "payload_invalid")
    ends = [kept.of(g.group_id, g.scored_members[0].meta.member)["trajectory"][0] for g in groups]
    assert [(end.attributes["fate"], end.failure) for end in ends] == [
        ("filtered", ""),
        ("failed", "payload_invalid"),
    ]


def test_without_a_collector_nothing_is_kept() -> None:
    traces, groups = BatchTraces(no_traces(), 1), make_groups(groups=1)
    traces.claimed(0, groups, 0)
    traces.dropped(groups, "filtered", "zero_variance")
    traces.trained(0, groups, {})
    traces.published(PolicyVersion(1, 1), 0)
    traces.committed(1)
    assert not traces._claimed
