"""The learner's part of the traces: claims, steps, publications, commits, and the groups that are dropped.

All methods but `trained` belong to the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rollmesh.learner.recovery.consumption_log import StepUse
from rollmesh.learner.rollouts.group import SampledGroup, SampledMember
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.telemetry.span import Value
from rollmesh.mesh.telemetry.trace_ids import ROOT, STEP
from rollmesh.mesh.telemetry.tracing import Trace, Tracer
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Phases of a step in the order in which they happen: the metric with their seconds, and the span.
_PHASES = (
    ("timing_s/gen", "gather"),
    ("timing_s/prepare", "prepare"),
    ("timing_s/update_actor", "train"),
    ("timing_s/claim", "claim"),
    ("timing_s/update_weights", "copy weights"),
)


class BatchTraces:
    """Reports spans of batches and of the trajectories in them.

    Args:
        tracer: of this learner.
        incarnation: of it.
    """

    def __init__(self, tracer: Tracer, incarnation: int) -> None:
        self._tracer = tracer
        self._incarnation = incarnation
        # Claimed batches whose commit is pending, by version: since when, and their groups.
        self._claimed: dict[int, tuple[int, list[SampledGroup]]] = {}

    def claimed(self, version: int, groups: Sequence[SampledGroup], began_ns: int) -> None:
        """Reports `claim` of a batch that trains `version`."""
        if not self._tracer.is_on:
            return
        now_ns = time.time_ns()
        attributes = {"incarnation": self._incarnation, "train_version": version}
        for group, _, trace in self._members(groups):
            trace.record("claim", began_ns, now_ns, attributes, number=group.leased.use)
        self._claimed[version] = now_ns, list(groups)

    def dropped(self, groups: Sequence[SampledGroup], fate: str, reason: str) -> None:
        """Reports trajectories that are not trained: `fate` is filtered or failed."""
        if not self._tracer.is_on:
            return
        now_ns = time.time_ns()
        for group, member, trace in self._members(groups):
            attributes = {**_facts(group, member), "fate": fate, "reason": reason}
            trace.record(ROOT, _admitted_ns(group), now_ns, attributes, failure=reason if fate == "failed" else "")

    def trained(self, version: int, groups: Sequence[SampledGroup], timings: Mapping[str, float]) -> None:
        """Reports `train` of a batch, and its step; called when the step's weights are copied.

        Args:
            version: that was trained.
            timings: seconds of the step's phases, by metric.
        """
        policy = PolicyVersion(self._incarnation, version + 1)
        step = self._tracer.version(policy)
        if step is None:
            return
        ends_ns = time.time_ns()
        # Counted back from the end: each phase ends where the next begins.
        spans: dict[str, tuple[int, int]] = {}
        for metric, name in reversed(_PHASES):
            began_ns = ends_ns - round(timings[metric] * 1e9)
            spans[name] = began_ns, ends_ns
            ends_ns = began_ns
        for name, (began_ns, ended_ns) in spans.items():
            step.record(name, began_ns, ended_ns)
        attributes = {"incarnation": self._incarnation, "train_version": version}
        step.record(STEP, spans["gather"][0], spans["copy weights"][1], {**attributes, "groups": len(groups)})
        began_ns, ended_ns = spans["train"][0], spans["claim"][1]
        for group, _, trace in self._members(groups):
            trace.record("train", began_ns, ended_ns, attributes, number=group.leased.use, link=step.root)

    def published(self, policy: PolicyVersion, began_ns: int) -> None:
        """Reports `publish` of a version that has come into force."""
        if (trace := self._tracer.version(policy)) is not None:
            trace.record("publish", began_ns, time.time_ns(), {"version": str(policy)})

    def committed(self, version: int) -> None:
        """Reports `commit` of all batches below `version`, and with it the end of their trajectories."""
        now_ns = time.time_ns()
        for trained in [each for each in self._claimed if each < version]:
            since_ns, groups = self._claimed.pop(trained)
            attributes = {"incarnation": self._incarnation, "train_version": trained, "committed_version": version}
            for group, member, trace in self._members(groups):
                use = group.leased.use
                trace.record("commit", since_ns, now_ns, attributes, number=use)
                if use == 1:
                    trace.record(ROOT, _admitted_ns(group), now_ns, {**_facts(group, member), "fate": "trained"})

    def _members(self, groups: Sequence[SampledGroup]) -> Iterator[tuple[SampledGroup, SampledMember, Trace]]:
        """The traced members of groups."""
        for group in groups:
            for member in group.scored_members:
                if (trace := self._tracer.trajectory(group.group_id, member.meta.member)) is not None:
                    yield group, member, trace


def record_inherited(tracer: Tracer, uses: Iterable[StepUse], committed: int, version: int) -> None:
    """Reports `commit` of steps of an earlier learner that this one commits, and the end of their trajectories.

    Args:
        tracer: of this learner.
        uses: of the surviving lineage.
        committed: every step below it was durable before.
        version: every step below it is durable now.
    """
    now_ns = time.time_ns()
    for use in uses:
        if not committed <= use.train_version < version:
            continue
        attributes = {
            "incarnation": use.incarnation,
            "train_version": use.train_version,
            "committed_version": version,
        }
        for group in use.groups:
            for member in group.members:
                if (trace := tracer.trajectory(group.group_id, member)) is None:
                    continue
                trace.record("commit", use.claimed_ns, now_ns, attributes, number=group.use)
                if group.use == 1:
                    facts: dict[str, Value] = {"table": TRAIN, "group": group.group_id, "member": member}
                    trace.record(ROOT, use.claimed_ns, now_ns, {**facts, "fate": "trained"})


def _facts(group: SampledGroup, member: SampledMember) -> dict[str, str | int | float]:
    meta = member.meta
    return {
        "table": TRAIN,
        "group": group.group_id,
        "member": meta.member,
        "generator": meta.generator,
        "attempts": group.leased.attempt,
        "response_tokens": meta.response_tokens,
        "reward": meta.reward,
        "oldest_version": str(PolicyVersion.from_proto(meta.oldest)),
        "newest_version": str(PolicyVersion.from_proto(meta.newest)),
    }


def _admitted_ns(group: SampledGroup) -> int:
    """Unix time of a group's admission: its last member was finished about when it was sealed."""
    sealed_ns = max(meta.finished_unix_ns for meta in group.leased.members)
    return int(sealed_ns - group.leased.generating_ms * 1_000_000)
