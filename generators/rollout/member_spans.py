"""A generator's part of the traces: sampling, the wait for the reward, storage; and the arrival of weights."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.mesh.telemetry.span import Event, Value
from rollmesh.mesh.telemetry.tracing import Tracer
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2, weights_pb2

Writes = list[tuple[ActiveGroup, PendingWrite]]
# Versions of which it is remembered when they came into service here.
_VERSIONS = 64


class MemberSpans:
    """Reports spans of members, each once it has ended.

    Args:
        tracer: of this generator.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._in_service: OrderedDict[PolicyVersion, int] = OrderedDict()

    def scored(
        self, group: ActiveGroup, finished: FinishedMember, meta: trajectory_pb2.MemberMeta, asked_ns: int
    ) -> None:
        """Reports `generate` and `reward` of a member that was sampled, with its outcome.

        Args:
            meta: as it is about to be stored.
            asked_ns: Unix time at which its reward was asked for.
        """
        trace = self._tracer.trajectory(group.group_id, finished.member)
        if trace is None:
            return
        attempt, result = group.grant.attempt, finished.result
        attributes = {
            "attempt": attempt,
            "prompt_tokens": meta.prompt_tokens,
            "response_tokens": meta.response_tokens,
            "taken_over_tokens": group.draft_tokens(finished.member),
            "finish_reason": result.finish_reason,
            "oldest_version": str(PolicyVersion.from_proto(meta.oldest)),
            "newest_version": str(PolicyVersion.from_proto(meta.newest)),
        }
        events = sorted(self._events(group, finished), key=lambda event: event.at_ns)
        trace.record("generate", group.begun_ns, finished.finished_unix_ns, attributes, number=attempt, events=events)
        unscored = "" if meta.outcome == trajectory_pb2.OUTCOME_SCORED else meta.reason
        reward = {"outcome": trajectory_pb2.Outcome.Name(meta.outcome).removeprefix("OUTCOME_").lower()}
        trace.record(
            "reward",
            asked_ns,
            time.time_ns(),
            reward if unscored else {**reward, "reward": meta.reward},
            number=attempt,
            failure=unscored,
        )

    def failed(self, group: ActiveGroup, member: int, reason: str) -> None:
        """Reports `generate` of a member that has no response."""
        if (trace := self._tracer.trajectory(group.group_id, member)) is not None:
            attempt, now_ns = group.grant.attempt, time.time_ns()
            attributes = {"attempt": attempt}
            trace.record("generate", group.begun_ns or now_ns, now_ns, attributes, number=attempt, failure=reason)

    def written(self, writes: Writes, results: Sequence[WriteResult], began_ns: int) -> None:
        """Reports `write`: members on their way to the buffer, until its answer."""
        if not self._tracer.is_on:
            return
        now_ns = time.time_ns()
        for (group, write), result in zip(writes, results, strict=True):
            if (trace := self._tracer.trajectory(group.group_id, write.head.meta.member)) is not None:
                status = buffer_pb2.WriteStatus.Name(result.status).removeprefix("WRITE_STATUS_").lower()
                trace.record(
                    "write", began_ns, now_ns, {"status": status}, number=group.grant.attempt, failure=result.message
                )

    def weights_came(self, report: weights_pb2.SwapReport) -> None:
        """Reports `receive`, in the trace of the version: its way here, or why it is not in service."""
        policy = PolicyVersion.from_proto(report.policy)
        trace = self._tracer.version(policy)
        if trace is None:
            return
        now_ns = time.time_ns()
        began_ns = now_ns - report.total_us * 1000
        events = []
        if not report.error:
            self._in_service[policy] = now_ns
            while len(self._in_service) > _VERSIONS:
                self._in_service.popitem(last=False)
            stages = {"first_byte": report.first_byte_us, "last_byte": report.last_byte_us}
            events = [Event(name, began_ns + us * 1000, {}) for name, us in stages.items()]
        attributes: dict[str, Value] = {
            "generator": report.member_id,
            "transport": report.transport,
            "encoding": report.encoding,
            "bytes": report.bytes,
            "pause_ms": report.pause_us / 1000,
        }
        trace.record(
            "receive", began_ns, now_ns, attributes, number=report.member_id, events=events, failure=report.error
        )

    def _events(self, group: ActiveGroup, finished: FinishedMember) -> Iterator[Event]:
        """The versions that sampled a response, from their arrival here on, and calls of tools."""
        result = finished.result
        for tokens, version in result.sampled.versions.runs:
            since_ns = self._in_service.get(version, group.begun_ns)
            yield Event("weights", max(since_ns, group.begun_ns), {"version": str(version), "tokens": tokens})
        if isinstance(result, EpisodeResult):
            for ended_ns, seconds, kind in result.tool_calls:
                yield Event("tool_call", ended_ns, {"seconds": seconds, "outcome": kind})
