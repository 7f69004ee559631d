"""A layout and a micro-batch size for the learner: the smallest number of ranks, and the largest budget, that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.plan import Plan, micro_batch
from rollmesh.planning.settings import with_settings
from rollmesh.planning.switches import Planner

_LARGEST_BUDGET = 1 << 18
_TOKENS = "learner.batch.tokens_per_micro_batch"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits: FSDP2 over all of its ranks (full shard).

    Attributes:
        ranks: of the learner.
        settings: the keys that make it, those alone that the configuration has otherwise.
        rank_bytes: peak of a rank.
        left: devices that the learner leaves to generators.
        nodes: over which they are divided.
    """

    ranks: int
    settings: dict[str, Any]
    rank_bytes: int
    left: int
    nodes: int


def propose(config: Config, cluster: Cluster, planner: Planner) -> tuple[Proposal | None, int | None]:
    """Looks for layouts.

    Args:
        config: of the run.
        cluster: its devices.
        planner: plans another configuration on the same devices.

    Returns:
        The smallest number of ranks (`learner.parallel.sp` times a power of two) at which a micro-batch of the longest
        sequence fits, with its largest budget. Then the largest budget of the configured layout. None where nothing
        fits.
    """
    configured = _largest_budget(config, {}, planner)
    for ranks in _rank_counts(config, cluster):
        for nodes in node_counts(cluster, ranks):
            settings = _full_shard(config, ranks, nodes)
            tokens = _largest_budget(config, settings, planner)
            if tokens is not None:
                settings[_TOKENS] = tokens
                peak = _alone(config, settings, planner).learner_peak
                return Proposal(ranks, settings, peak, cluster.count - ranks, nodes), configured
    return None, configured


def _rank_counts(config: Config, cluster: Cluster) -> Iterator[int]:
    """Numbers of ranks that the configured division of sequences divides."""
    sp = config.learner.parallel.sp
    return (power * sp for power in _powers(cluster.count // sp))


def _full_shard(config: Config, ranks: int, nodes: int) -> dict[str, Any]:
    learner = config.learner
    settings = spread(config, ranks, nodes)
    if learner.parallel.shards is not None:
        settings["learner.parallel.shards"] = None
    if learner.devices is not None:
        settings["learner.devices"] = None
    return settings


def _largest_budget(config: Config, settings: dict[str, Any], planner: Planner) -> int | None:
    """The largest power of two, or the longest sequence, that fits ranks with devices of their own."""
    best = None
    longest = config.rollout.context_tokens
    for tokens in sorted({longest, *(size for size in _powers(_LARGEST_BUDGET) if size > longest)}):
        tried = settings | {_TOKENS: tokens}
        if not _alone(config, tried, planner).has_room:
            return best
        best = tokens
        if micro_batch(with_settings(config, tried))[0] < tokens:
            # A rank's whole part of a step is smaller.
            return best
    return best


def _alone(config: Config, settings: dict[str, Any], planner: Planner) -> Plan:
    return planner(with_settings(config, settings | {"rollout.replicas": 0}))


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
