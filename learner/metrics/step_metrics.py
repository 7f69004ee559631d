"""The record of one step, from the metadata of its groups.

Names are those of `learner.metrics.catalogue`: verl's and TRL's where they have one. Engine and algorithm add theirs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

# Characters of a cause's code that are kept: reward services may send any.
_CODE_CHARACTERS = 64


def group_metrics(groups: Sequence[SampledGroup]) -> dict[str, Any]:
    """Rewards, lengths and delays of a batch; no algorithm or engine needed.

    Returns:
        Metric name -> value. Lengths in tokens, delays in seconds, shares in 0..1.
    """
    scored = [member.meta for group in groups for member in group.scored_members]
    rewards = np.array([member.reward for member in scored])
    lengths = np.array([member.response_tokens for member in scored])
    prompts = np.array([member.prompt_tokens for member in scored])
    by_group = [[member.meta.reward for member in group.scored_members] for group in groups]
    capped = np.array([member.truncated for group in groups for member in group.scored_members])
    metrics: dict[str, Any] = {
        "groups": len(groups),
        "samples": len(scored),
        "critic/score/mean": float(rewards.mean()),
        "critic/score/std": float(rewards.std()),
        "critic/score/min": float(rewards.min()),
        "critic/score/max": float(rewards.max()),
        "reward_std": float(np.mean([_sample_std(group) for group in by_group])),
        "frac_reward_zero_std": float(np.mean([max(group) == min(group) for group in by_group])),
        **_extremes("response_length/{}", lengths),
        "response_length/clip_ratio": float(capped.mean()),
        **_extremes("completions/{}_terminated_length", lengths[~capped]),
        **_extremes("prompt_length/{}", prompts),
        "perf/total_num_tokens": int(lengths.sum() + prompts.sum()),
        **_unscored([member.meta for group in groups for member in group.members if not member.scored]),
        "attempts/max": max(group.leased.attempt for group in groups),
        "delay/generating_s": float(np.mean([group.leased.generating_ms for group in groups])) / 1e3,
        "delay/queued_s": float(np.mean([group.leased.queued_ms for group in groups])) / 1e3,
    }
    names = {name for member in scored for name in member.components}
    for name in sorted(names):
        values = [member.components[name] for member in scored if name in member.components]
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        metrics[f"rewards/{name}/std"] = _sample_std(values)
    for name in sorted({name for member in scored for name in member.metrics}):
        metrics[f"agent/{name}/mean"] = float(np.mean([m.metrics[name] for m in scored if name in m.metrics]))
    greedy = [group.baseline_reward for group in groups if group.baseline_reward is not None]
    if greedy:
        metrics["reward/greedy/mean"] = float(np.mean(greedy))
    return metrics


def _unscored(without: Sequence[trajectory_pb2.MemberMeta]) -> dict[str, Any]:
    """Counts of members without a reward, in all and by code, and the newest cause in words."""
    metrics: dict[str, Any] = {"unscored_members": len(without)}
    if without:
        codes = Counter(_code(member) for member in without)
        metrics |= {f"unscored/{code}": count for code, count in sorted(codes.items())}
        metrics["unscored_cause"] = max(without, key=lambda member: member.finished_unix_ns).reason
    return metrics


def _code(member: trajectory_pb2.MemberMeta) -> str:
    """The code in a reason, such as `reward_timeout`, `episode_failed`; `unscorable` for the reward's own answer."""
    if member.outcome == trajectory_pb2.OUTCOME_UNSCORABLE:
        return "unscorable"
    return re.sub(r"[^\w.-]+", "_", member.reason.partition(":")[0])[:_CODE_CHARACTERS] or "unknown"


def _extremes(form: str, values: NDArray[np.int64]) -> dict[str, float]:
    """Mean, maximum and minimum under the names that `form` makes; nothing for no values."""
    if not values.size:
        return {}
    return {
        form.format("mean"): float(values.mean()),
        form.format("max"): int(values.max()),
        form.format("min"): int(values.min()),
    }


def _sample_std(values: Sequence[float]) -> float:
    """Standard deviation of a sample (n - 1), as TRL reports it; 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def staleness_histogram(groups: Sequence[SampledGroup], lineage: Lineage, now: int) -> Counter[int]:
    """Trained tokens by staleness; members without their payload here count by their oldest token."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for member in group.scored_members:
            if member.trajectory is not None:
                for length, version in member.trajectory.versions.runs:
                    histogram[lineage.staleness(version, now)] += length
            else:
                oldest = PolicyVersion.from_proto(member.meta.oldest)
                histogram[lineage.staleness(oldest, now)] += member.meta.response_tokens
    return histogram


def staleness_metrics(histogram: Mapping[int, int]) -> dict[str, Any]:
    """Mean and maximum over tokens, and the histogram itself (staleness -> tokens)."""
    tokens = sum(histogram.values())
    return {
        "staleness/mean": sum(age * count for age, count in histogram.items()) / tokens if tokens else 0.0,
        "staleness/max": max(histogram, default=0),
        "staleness/histogram": {str(age): count for age, count in sorted(histogram.items())},
    }
