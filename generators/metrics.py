"""Metrics of a generator: for heartbeats and for Prometheus (a registry of its own)."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollmesh.generators.engines.types import EngineStatus
from rollmesh.generators.placement.device_turns import DeviceTurns
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.generators.rollout.rollout_manager import RolloutManager
from rollmesh.generators.rollout.submission import TrajectorySubmitter
from rollmesh.protos import weights_pb2

_HELP = {
    "tokens_per_second": "Sampled tokens per second since the last report.",
    "active_sequences": "Sequences being decoded.",
    "queued_sequences": "Sequences waiting for a slot.",
    "concurrency_limit": "Sequences that the engine is given at once.",
    "groups_held": "Groups in progress.",
    "undelivered_members": "Finished members being scored or written.",
    "members_unscored": "Finished members that wait for their reward.",
    "reward_wait_seconds": "For how long the first of them has waited.",
    "tokens_generated": "Sampled tokens since the start.",
    "tokens_for_groups": "Of those, for members of groups: calls from outside are left out.",
    "swaps": "Weight updates since the start.",
    "gate_wait_seconds": "Seconds since the start for which nothing was decoded because nothing was granted.",
    "members_scored": "Members scored since the start.",
    "members_unscorable": "Members without a right score since the start.",
    "members_failed": "Members that ended in an error since the start.",
    "members_superseded": "Members that were not needed any more since the start.",
    "drafts_written": "Drafts of unfinished members stored since the start.",
    "tokens_taken_over": "Tokens of drafts that were continued instead of sampled again since the start.",
    "groups_cancelled": "Groups cancelled here because they were not needed any more since the start.",
    "rss_bytes": "Resident memory of the process.",
    "peak_rss_bytes": "Largest resident memory seen at a report.",
    "weights_version": "Version of the weights in service.",
    "weights_incarnation": "Incarnation of the weights in service.",
    "shares_devices": "1 where it takes turns with the learner on the same devices.",
    "asleep": "1 while it sleeps for the learner.",
    "sleeps": "Turns of the learner for which it fell asleep since the start.",
    "wakes": "Turns of its own that began since the start.",
    "asleep_seconds": "Seconds since the start for which it slept.",
    "sleep_freed_bytes": "Memory that the last sleep gave back.",
}
_AGENT_HELP = {
    "agent_episodes": "Episodes of several turns that have ended since the start.",
    "agent_episodes_failed": "Episodes whose environment broke, or that could not be sampled, since the start.",
    "agent_drafts_not_gone_on": "Episodes that began again because their draft could not be continued.",
    "agent_turns": "Turns of the model since the start.",
    "agent_tool_calls": "Calls of tools since the start.",
    "agent_tool_errors": "Calls that ended in an error, those that could not be read included.",
    "agent_tool_timeouts": "Calls of tools that did not end in time.",
    "agent_tool_seconds": "Seconds that calls of tools took in all.",
    "agent_calls": "Calls of the endpoint by programs since the start.",
    "agent_calls_aborted": "Calls that programs left before their answer was complete.",
    "agent_calls_sampling_ignored": "Calls that asked for another sampling than training has.",
    "agent_branches_dropped": "Ends of conversations of programs that are in no trajectory.",
    "agent_tokens_dropped": "Tokens sampled for programs that are in no trajectory.",
    "agent_timeouts": "Episodes of programs that were ended because their time was up.",
    "agent_calls_hanging": "Calls of tools and environments that do not return.",
}


# Seconds: a pause lasts microseconds, a full transfer over a slow link minutes.
_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_STAGES = ("first_byte", "last_byte", "pause", "total")


class GeneratorMetrics:
    """Turns snapshots into metrics; rates are over the time between two calls of `update`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"rollmesh_generator_{name}", text, registry=self.registry)
            for name, text in {**_HELP, **_AGENT_HELP}.items()
        }
        self._weights = Histogram(
            "rollmesh_generator_weights_seconds",
            "From a version's announcement to its first byte, last verified byte and service (total), and the pause in "
            "decoding.",
            ["stage"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._weights_bytes = Counter(
            "rollmesh_generator_weights_bytes",
            "Bytes of weights received.",
            ["transport", "encoding"],
            registry=self.registry,
        )
        self._weights_failures = Counter(
            "rollmesh_generator_weights_failures", "Versions refused or not received.", registry=self.registry
        )
        self._weights_kept = Gauge(
            "rollmesh_generator_weights_kept_bytes", "Host copy that deltas are applied to.", registry=self.registry
        )
        self._turn_seconds = Gauge(
            "rollmesh_generator_turn_seconds",
            "Seconds that each action of falling asleep and waking up took when it was done last.",
            ["action"],
            registry=self.registry,
        )
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
        for action, seconds in counts.seconds.items():
            self._turn_seconds.labels(action).set(seconds)
        values.update({f"agent_{name}": value for name, value in (agents or {}).items()})
        for name, value in values.items():
            self._gauges[name].set(value)
        return values
