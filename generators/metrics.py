"""Metrics of a generator: for heartbeats and for Prometheus (a registry of its own)."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil
from prometheus_client import CollectorRegistry

from rollmesh.generators.engines.types import EngineStatus
from rollmesh.generators.openai_server.metrics import METRICS as ENDPOINT_METRICS
from rollmesh.generators.placement.device_turns import DeviceTurns
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.generators.rollout.rollout_manager import RolloutManager
from rollmesh.generators.rollout.submission import TrajectorySubmitter
from rollmesh.mesh.telemetry.metric_spec import SpecCollector, SpecFactory, Values
from rollmesh.mesh.weights.bucket_set import DAMAGED, DAMAGED_BUCKETS
from rollmesh.protos import weights_pb2

_GENERATOR = SpecFactory("generator")
_counter, _gauge = _GENERATOR.counter, _GENERATOR.gauge
# Metrics of a snapshot, by the heartbeat's name of the value.
_OF_SNAPSHOT = {
    "tokens_per_second": _gauge("tokens_per_second", "Sampled tokens per second since the last report"),
    "active_sequences": _gauge("active_sequences", "Sequences being decoded"),
    "queued_sequences": _gauge("queued_sequences", "Sequences waiting for a slot"),
    "concurrency_limit": _gauge("concurrency_limit", "Sequences that the engine is given at once"),
    "groups_held": _gauge("groups_held", "Groups in progress"),
    "undelivered_members": _gauge("undelivered_members", "Finished members being scored or written"),
    "members_unscored": _gauge("members_unscored", "Finished members that wait for their reward"),
    "reward_wait_seconds": _gauge("reward_wait_seconds", "For how long the first of them has waited"),
    "tokens_generated": _counter("tokens_generated", "Sampled tokens"),
    "tokens_for_groups": _counter("tokens_for_groups", "Of those, for members of groups: calls from outside left out"),
    "swaps": _counter("swaps", "Weight updates"),
    "gate_wait_seconds": _counter("gate_wait_seconds", "Time in which nothing was decoded for lack of grants"),
    "drafts_written": _counter("drafts_written", "Drafts of unfinished members stored"),
    "tokens_taken_over": _counter("tokens_taken_over", "Tokens of drafts continued instead of sampled again"),
    "groups_cancelled": _counter("groups_cancelled", "Groups cancelled here because they were not needed any more"),
    "peak_rss_bytes": _gauge("peak_rss_bytes", "Largest resident memory seen at a report"),
    "weights_version": _gauge("weights_version", "Version of the weights in service"),
    "weights_incarnation": _gauge("weights_incarnation", "Incarnation of the weights in service"),
    "shares_devices": _gauge("shares_devices", "1 where it takes turns with the learner on the same devices"),
    "asleep": _gauge("asleep", "1 while it sleeps for the learner"),
    "sleeps": _counter("sleeps", "Turns of the learner for which it fell asleep"),
    "wakes": _counter("wakes", "Turns of its own that began"),
    "asleep_seconds": _counter("asleep_seconds", "Time for which it slept"),
    "sleep_freed_bytes": _gauge("sleep_freed_bytes", "Memory that the last sleep gave back"),
    "agent_episodes": _counter("agent_episodes", "Episodes of several turns that have ended"),
    "agent_episodes_failed": _counter(
        "agent_episodes_failed", "Episodes whose environment broke, or that could not be sampled"
    ),
    "agent_drafts_not_gone_on": _counter(
        "agent_drafts_restarted", "Episodes that began again because their draft could not be continued"
    ),
    "agent_turns": _counter("agent_turns", "Turns of the model"),
    "agent_tool_calls": _counter("agent_tool_calls", "Calls of tools"),
    "agent_tool_errors": _counter("agent_tool_errors", "Calls that ended in an error, or could not be read"),
    "agent_tool_timeouts": _counter("agent_tool_timeouts", "Calls of tools that did not end in time"),
    "agent_tool_seconds": _counter("agent_tool_seconds", "Time that calls of tools took in all"),
    "agent_calls": _counter("agent_calls", "Calls of the endpoint by programs"),
    "agent_calls_aborted": _counter("agent_calls_aborted", "Calls that programs left before their answer was complete"),
    "agent_calls_sampling_ignored": _counter(
        "agent_calls_sampling_ignored", "Calls that asked for another sampling than training has"
    ),
    "agent_calls_constrained": _counter("agent_calls_constrained", "Calls whose answers had to call a tool or be JSON"),
    "agent_branches_dropped": _counter(
        "agent_branches_dropped", "Ends of conversations of programs that are in no trajectory"
    ),
    "agent_turns_dropped": _counter("agent_turns_dropped", "Turns of programs that are in no trajectory"),
    "agent_tokens_dropped": _counter("agent_tokens_dropped", "Tokens sampled for programs that are in no trajectory"),
    "agent_timeouts": _counter("agent_timeouts", "Episodes of programs that were ended because their time was up"),
    "agent_calls_hanging": _gauge("agent_calls_hanging", "Calls of tools and environments that do not return"),
}
_MEMBERS = _counter("members", "Members by outcome: scored, unscorable, failed, superseded (not needed)", "outcome")
_OUTCOMES = ("scored", "unscorable", "failed", "superseded")
_TURN = _gauge(
    "turn_seconds", "How long each action of falling asleep and waking up took when it was done last", "action"
)
_WEIGHTS = _GENERATOR.histogram(
    "weights_seconds",
    "From a version's announcement to its first byte, last verified byte and service (total), and the decoding pause",
    "stage",
)
_WEIGHTS_BYTES = _counter("weights_bytes", "Bytes of weights received", "transport", "encoding")
_WEIGHTS_FAILURES = _counter("weights_failures", "Versions refused or not received")
_VERIFICATIONS = _counter(
    "weights_verifications",
    "Comparisons of the engine's weights with the announced ones, for `rollmesh weights verify`",
    "outcome",
)
_WEIGHTS_KEPT = _gauge("weights_kept_bytes", "Host copy that deltas are applied to")
METRICS = (
    *_OF_SNAPSHOT.values(),
    *(_MEMBERS, _TURN),
    *(_WEIGHTS, _WEIGHTS_BYTES, _WEIGHTS_FAILURES, _VERIFICATIONS, _WEIGHTS_KEPT),
    DAMAGED_BUCKETS,
    *ENDPOINT_METRICS,
)
# Seconds: a pause lasts microseconds, a full transfer over a slow link minutes.
_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_VERIFIED = ("agrees", "differs", "not_comparable")
_STAGES = ("first_byte", "last_byte", "pause", "total")


class GeneratorMetrics:
    """Turns snapshots into metrics; rates are over the time between two calls of `update`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The last snapshot by name of the heartbeat; seconds of turns by action.
        self._values: Mapping[str, float] = {}
        self._turns: Mapping[str, float] = {}
        self.registry.register(SpecCollector((*_OF_SNAPSHOT.values(), _MEMBERS, _TURN), self._read))
        self._weights = _WEIGHTS.as_histogram(_BUCKETS, self.registry)
        self._weights_bytes = _WEIGHTS_BYTES.as_counter(self.registry)
        self._weights_failures = _WEIGHTS_FAILURES.as_counter(self.registry)
        self._verifications = _VERIFICATIONS.as_counter(self.registry)
        # An alert sees the first one only where there was a zero before.
        for outcome in _VERIFIED:
            self._verifications.labels(outcome)
        self._weights_kept = _WEIGHTS_KEPT.as_gauge(self.registry)
        self.registry.register(DAMAGED)
        self._process = psutil.Process()
        self._last_time = time.monotonic()
        self._last_tokens = 0
        self._gate_wait_s = 0.0
        self._peak_rss = 0

    def record_swap(self, report: weights_pb2.SwapReport) -> None:
        """Records the outcome of a version of the weights."""
        if report.error:
            self._weights_failures.inc()
            return
        for stage in _STAGES:
            self._weights.labels(stage).observe(getattr(report, f"{stage}_us") / 1e6)
        if report.bytes:
            self._weights_bytes.labels(report.transport, report.encoding).inc(report.bytes)
        self._weights_kept.set(report.kept_bytes)

    def record_verification(self, outcome: str) -> None:
        """Records a comparison of the weights in service: agrees, differs or not_comparable."""
        self._verifications.labels(outcome).inc()

    def update(
        self,
        status: EngineStatus,
        rollout: RolloutManager,
        submitter: TrajectorySubmitter,
        drafts: DraftUploader,
        turns: DeviceTurns,
        agents: Mapping[str, float] | None = None,
    ) -> Mapping[str, float]:
        """Sets the metrics of a snapshot, and returns them by name.

        Args:
            status: of the engine.
            rollout: for the groups in progress, and its counters.
            submitter, drafts: for their counters.
            turns: its sleep.
            agents: counts of episodes; None without agents.
        """
        load = rollout.capacity.load
        unscored, reward_wait_s = submitter.waiting_for_rewards()
        now = time.monotonic()
        elapsed = max(1e-6, now - self._last_time)
        tokens = status.tokens_generated - self._last_tokens
        # The engine decodes nothing for lack of grants.
        if status.serving is not None and load.generating == 0 and tokens == 0 and not turns.asleep:
            self._gate_wait_s += elapsed
        self._last_time, self._last_tokens = now, status.tokens_generated
        rss = self._process.memory_info().rss
        self._peak_rss = max(self._peak_rss, rss)
        values = {
            "tokens_per_second": tokens / elapsed,
            "active_sequences": status.active,
            "queued_sequences": status.queued,
            "concurrency_limit": rollout.capacity.limit,
            "groups_held": rollout.active_groups,
            "undelivered_members": load.undelivered,
            "members_unscored": unscored,
            "reward_wait_seconds": reward_wait_s,
            "tokens_generated": status.tokens_generated,
            "tokens_for_groups": status.tokens_for_groups,
            "swaps": status.swaps,
            "gate_wait_seconds": self._gate_wait_s,
            "members_scored": submitter.scored,
            "members_unscorable": submitter.unscorable,
            "members_failed": submitter.failed,
            "members_superseded": submitter.superseded,
            "drafts_written": drafts.written,
            "tokens_taken_over": rollout.taken_over,
            "groups_cancelled": rollout.cancelled,
            "rss_bytes": rss,
            "peak_rss_bytes": self._peak_rss,
            "weights_version": status.serving.version if status.serving else 0,
            "weights_incarnation": status.serving.incarnation if status.serving else 0,
        }
        counts = turns.counts
        values.update(
            shares_devices=float(turns.shares_devices),
            asleep=float(turns.asleep),
            sleeps=counts.sleeps,
            wakes=counts.wakes,
            asleep_seconds=counts.asleep_s,
            sleep_freed_bytes=counts.freed_bytes,
        )
        values.update({f"agent_{name}": value for name, value in (agents or {}).items()})
        self._values, self._turns = values, {str(action): took for action, took in counts.seconds.items()}
        return values

    def _read(self) -> Values:
        values, turns = self._values, self._turns
        shown: dict[str, dict[tuple[str, ...], float]] = {
            spec.name: {(): values[name]} for name, spec in _OF_SNAPSHOT.items() if name in values
        }
        shown[_MEMBERS.name] = {(outcome,): values.get(f"members_{outcome}", 0.0) for outcome in _OUTCOMES}
        shown[_TURN.name] = {(action,): seconds for action, seconds in turns.items()}
        return shown
