"""The record of one step, from the metadata of its groups.

Names follow the field: `reward/mean`, `response_length/mean`, `staleness/mean`, `tokens_per_second`, `timing/*_s`,
`zero_variance_share`, and whatever engine and algorithm report under their own names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from learner.groups import SampledGroup, is_scored
from learner.lineage import Lineage
from mesh.versions import PolicyVersion
from protos import trajectory_pb2


def group_metrics(groups: Sequence[SampledGroup]) -> dict[str, Any]:
    """Rewards, lengths and delays of a batch; no algorithm or engine needed.

    Returns:
        Metric name -> value. Lengths in tokens, delays in seconds, shares in 0..1.
    """
    members = [member for group in groups for member in group.members]
    scored = [member for member in members if is_scored(member)]
    rewards = np.array([member.reward for member in scored])
    lengths = np.array([member.response_tokens for member in scored])
    prompts = np.array([member.prompt_tokens for member in scored])
    by_group = [[m.reward for m in group.members if is_scored(m)] for group in groups]
    capped = [member.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH for member in scored]
    metrics: dict[str, Any] = {
        "groups": len(groups),
        "samples": len(scored),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": int(lengths.max()),
        "response_length/capped_share": float(np.mean(capped)),
        "prompt_length/mean": float(prompts.mean()),
        "zero_variance_share": float(np.mean([max(r) == min(r) for r in by_group])),
        "unscored_members": len(members) - len(scored),
        "attempts/max": max(group.leased.attempt for group in groups),
        "delay/generating_s": float(np.mean([group.leased.generating_ms for group in groups])) / 1e3,
        "delay/queued_s": float(np.mean([group.leased.queued_ms for group in groups])) / 1e3,
    }
    names = {name for member in scored for name in member.components}
    for name in sorted(names):
        values = [member.components[name] for member in scored if name in member.components]
        metrics[f"reward/component/{name}"] = float(np.mean(values))
    return metrics


def staleness_histogram(groups: Sequence[SampledGroup], lineage: Lineage, now: int) -> Counter[int]:
    """Trained tokens by staleness; members without payload at hand count by their oldest token."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for member, trajectory in zip(group.members, group.trajectories, strict=True):
            if trajectory is not None:
                for length, version in trajectory.versions.runs:
                    histogram[lineage.staleness(version, now)] += length
            elif is_scored(member):
                oldest = PolicyVersion.from_proto(member.oldest)
                histogram[lineage.staleness(oldest, now)] += member.response_tokens
    return histogram


def staleness_metrics(histogram: Mapping[int, int]) -> dict[str, Any]:
    """Mean and maximum over tokens, and the histogram itself (staleness -> tokens)."""
    tokens = sum(histogram.values())
    return {
        "staleness/mean": sum(age * count for age, count in histogram.items()) / tokens if tokens else 0.0,
        "staleness/max": max(histogram, default=0),
        "staleness/histogram": {str(age): count for age, count in sorted(histogram.items())},
    }
