"""Run folders and meshes that the page's tests share; no process is started for them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.dashboard.live import LiveMesh
from rollmesh.dashboard.run_view import RunView
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.page.live_runs import live_mesh
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.mesh.config import load_config, save_config
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2, weights_pb2
from rollmesh.report.summary import FinalState, write_summary
from rollmesh.run_files import read_config

START = 1_790_000_000.0
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script> {{7*7}}'
"""A text that becomes code wherever it is not kept a text."""


REASONING = (
    "The train covers 120 km in 1.5 hours. Speed is distance over time, so I divide 120 by 1.5. First 120 / 3 = 40, "
    "and 1.5 is half of 3, so 120 / 1.5 = 2 * 40 = 80.\n\nThe train covers 80 km in an hour, thus its "
    "speed is 80 km/h. Check: 80 * 1.5 = 120. The answer is 80."
)
"""A response with lines and many tokens."""


def training(step: int, **more: Any) -> dict[str, Any]:
    """The record of a step of a run that learns."""
    done = 1 - math.exp(-step / 60)
    wave = math.sin(step * 12.9898) * 43758.5453 % 1 - 0.5
    return {
        "step": step,
        "time": START + 10 + 0.5 * step,
        "wall_s": 10 + 0.5 * step,
        "version": step,
        "incarnation": 1,
        "samples": 256,
        "critic/score/mean": 0.1 + 0.8 * done + 0.1 * wave,
        "frac_reward_zero_std": 0.2 + 0.5 * done + 0.1 * wave,
        "response_length/mean": 120 + 80 * done + 20 * wave,
        "response_length/max": 512,
        "response_length/clip_ratio": max(0.0, 0.08 - 0.05 * done + 0.02 * wave),
        "actor/entropy": 1.6 - 1.2 * done + 0.05 * wave,
        "actor/ppo_kl": 0.01 + 0.02 * abs(wave),
        "actor/k3_kl": 0.012 + 0.02 * abs(wave),
        "actor/grad_norm": 0.8 + 0.6 * abs(wave),
        "actor/pg_clipfrac": 0.02 + 0.04 * abs(wave),
        "actor/loss": 0.01 + 0.02 * wave,
        "actor/lr": 1e-6,
        "staleness/mean": 1.4 + 0.5 * wave,
        "staleness/max": 2,
        "staleness/histogram": {"0": 100, "1": 300 + 100 * wave, "2": 600 - 100 * wave},
        "rollout_corr/ratio/ess": 0.95 - 0.1 * abs(wave),
        "mismatch/log_prob_diff": 0.002 + 0.001 * abs(wave),
        "tokens_per_second": 5200 + 900 * wave,
        "total/tokens": 3_000 * step,
        "timing_s/gen": 0.05 + 0.05 * abs(wave),
        "timing_s/prepare": 0.04,
        "timing_s/update_actor": 0.32 + 0.05 * wave,
        "timing_s/update_weights": 0.03,
        "delay/generating_s": 2.1 + wave,
        "delay/queued_s": 0.8 + 0.5 * wave,
        "push/total_ms_p50": 42.0,
        "push/total_ms_p99": 110.0,
        **more,
    }


def evaluation(step: int) -> dict[str, Any]:
    """The record of an evaluation."""
    reward = 0.3 + 0.6 * (1 - math.exp(-step / 60))
    return {
        "step": step,
        "time": START + 10.2 + 0.5 * step,
        "wall_s": 10.2 + 0.5 * step,
        "eval/reward": reward,
        "eval/response_length/mean": 150.0,
    }


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file of one JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_run(
    folder: Path, steps: int, *, learning_rate: float = 1e-6, ended: str = "finished", text: str = HOSTILE
) -> Path:
    """A run folder with all that the page reads.

    Args:
        folder: that does not exist yet.
        steps: that were trained.
        learning_rate: a setting in which runs may differ.
        ended: how it did; empty: it has left no summary.
        text: in place of what services and models say.
    """
    config = load_config(
        {
            "run": {"name": folder.name, "dir": str(folder.parent)},
            "model": {"path": "Qwen/Qwen3-8B"},
            "data": {"train": "math.parquet", "eval": "held-out.parquet"},
            "learner": {"steps": 200, "optimizer": {"lr": learning_rate}},
        }
    )
    folder.mkdir(parents=True)
    save_config(config, folder / CONFIG)
    failing = {"unscored/reward_timeout": 3, "unscored_cause": text}
    records = [training(step, **(failing if step == 2 else {})) for step in range(1, steps + 1)]
    records += [evaluation(step) for step in range(0, steps + 1, 20)]
    write_records(folder / "metrics.jsonl", sorted(records, key=lambda record: record["time"]))
    write_records(folder / "mesh.jsonl", map(snapshot, range(10 + steps // 2)))
    write_records(
        folder / "samples.jsonl", [sample(step, member, text) for step in range(1, steps + 1) for member in (0, 1)]
    )
    write_records(folder / "restarts.jsonl", [{"time": START, "service": "generator-1", "reason": "exit"}])
    if ended:
        write_summary(folder, read_config(folder), final_state(ended, text))
    return folder


def snapshot(second: int) -> dict[str, Any]:
    """A line of the launcher's about the mesh."""
    return {
        "time": START + second,
        "version": max(0, 2 * (second - 10)),
        "generators": 4,
        "generated_tokens": 6100.0 * max(0, second - 6),
        "gate_wait_s": 0.8 * max(0, second - 8),
        "learner_wait_s": 0.9 * min(second, 10) + 0.1 * second,
    }


def sample_tokens(text: str, member: int) -> dict[str, Any]:
    """Words of a text with values; of an odd member a tool says the first two."""
    words = [len(word) for word in re.findall(r"\s*\S+|\s+$", text)]
    places = range(len(words))
    log_probs: list[Any] = [round(-0.05 - 1.5 * abs(math.sin(3 * place + member)) ** 3, 4) for place in places]
    gaps = [0.04 * math.sin(5 * place) ** 3 + (0.2 if place == 7 else 0.0) for place in places]
    policy: list[Any] = [round(value + gap, 4) for value, gap in zip(log_probs, gaps, strict=True)]
    hidden = 2 * (member % 2)
    log_probs[:hidden], policy[:hidden] = [None] * hidden, [None] * hidden
    older = len(words) // 2
    return {
        "count": len(words),
        "characters": words,
        "mask": [0] * hidden + [[len(words) - hidden, 1]],
        "staleness": [[older, 2], [len(words) - older, 1]],
        "log_probs": log_probs,
        "policy_log_probs": policy,
        "advantages": [None] * hidden
        + [round(0.7 - 1.4 * (member % 2) + 0.3 * math.sin(place), 4) for place in places][hidden:],
    }


def sample(step: int, member: int, text: str) -> dict[str, Any]:
    """A kept sample."""
    response = text if member else REASONING
    tokens = sample_tokens(response, member)
    older = tokens["count"] // 2
    return {
        "step": step,
        "group": f"train-{step}",
        "member": member,
        "prompt": "A train covers 120 km in 1.5 hours. How fast is it?",
        "response": response,
        "reward": float(not member),
        "components": {"correct": float(not member), "format": 1.0},
        "members": [[0, 1.0], [1, 0.0], [2, 1.0], [3, None]],
        "ground_truth": "80",
        "finish_reason": "stop",
        "generator": "generator-0",
        "versions": [[older, 1, step - 3], [tokens["count"] - older, 1, step - 2]],
        "tokens": tokens,
    }


def final_state(ended: str, text: str) -> FinalState:
    """The launcher's knowledge at the end."""
    counts = buffer_pb2.LedgerCounts(admitted=3300, trained=3200, evicted_stale=40, filtered=20, failed=8, ready=32)
    counts.reasons.update({"trained/committed": 3200, "evicted_stale/too_old": 40, "filtered/zero_variance": 20})
    counts.reasons["failed/too_few_scored"] = 8
    ledger = buffer_pb2.LedgerResponse(counters=counts, recounted=counts)
    ledger.failed.add(causes=[text])
    return FinalState(
        tables={"train": buffer_pb2.DescribeResponse(waiting_for_inserts_ms=9000, waiting_for_samples_ms=52000)},
        ledgers={"train": ledger},
        peak_memory_bytes={"learner": 6 << 30, "generator-0": 4 << 30},
        wall_s=118.0,
        ended=ended,
    )


def policy(version: int) -> trajectory_pb2.PolicyVersion:
    """A version of the first learner."""
    return trajectory_pb2.PolicyVersion(incarnation=1, version=version)


def generators(count: int, version: int) -> list[membership_pb2.Member]:
    """Generators of which every seventh waits, and the last one has no heartbeat."""
    return [
        membership_pb2.Member(
            member_id=f"generator-{place}",
            role=membership_pb2.ROLE_GENERATOR,
            address=f"10.0.{place // 250}.{place % 250}:5000",
            serving=policy(version),
            gauges={"tokens_per_second": 1500.0, "active_sequences": 32, "rss_bytes": 4e9},
            heartbeat_age_ms=60_000 if place == count - 1 else 400,
            waiting_reason="reward services do not answer" if place % 7 == 6 else "",
        )
        for place in range(count)
    ]


def mesh_now(count: int = 4, version: int = 120) -> LiveMesh:
    """The mesh of a run in progress with so many generators."""
    learner = membership_pb2.Member(
        member_id="learner-0",
        role=membership_pb2.ROLE_LEARNER,
        address="10.1.0.1:5000",
        serving=policy(version),
        gauges={"steps": version, "tokens_per_second": 5200.0, "phase/training": 1.0, "critic/score/mean": 0.7},
        heartbeat_age_ms=300,
    )
    reward = membership_pb2.Member(member_id="reward-0", role=membership_pb2.ROLE_REWARD, heartbeat_age_ms=200)
    front = membership_pb2.Member(member_id="buffer-0", role=membership_pb2.ROLE_BUFFER, heartbeat_age_ms=100)
    counts = buffer_pb2.LedgerCounts(
        admitted=4000, trained=3800, evicted_stale=30, failed=6, generating=120, ready=30, leased=14, pending=96
    )
    counts.reasons.update({"failed/too_few_scored": 6, "evicted_stale/too_old": 30})
    table = buffer_pb2.DescribeResponse(
        table="train",
        policy=policy(version),
        counts=counts,
        groups_per_step=32,
        max_staleness=4,
        bytes=48_000_000,
        generators_wait="staleness bound: they continue at the next version",
    )
    members = [*generators(count, version), learner, reward, front]
    return live_mesh(Snapshot(table=table, members=members), _pushes(count))


def _pushes(count: int) -> weights_pb2.PushesResponse:
    answer = weights_pb2.PushesResponse()
    for place in range(count):
        entry = answer.receivers.add(member_id=f"generator-{place}", count=120)
        entry.last.policy.CopyFrom(policy(120))
        entry.last.transport, entry.last.encoding, entry.last.bytes = "grpc", "delta", 2_500_000
    return answer


class StaticRuns:
    """Runs that do not change, in place of folders and meshes; the rest of the server is the real one.

    Args:
        views: the runs.
    """

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views = views
        self.closed = False

    async def ask(self) -> None:
        """Nothing is asked."""

    def read(self) -> Sequence[RunView]:
        """The runs."""
        return self.views

    async def close(self) -> None:
        """Marks the end."""
        self.closed = True
