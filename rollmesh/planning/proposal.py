"""A layout and a micro-batch size for the learner: the smallest number of ranks, and the largest budget, that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.plan import Plan, micro_batch
from rollmesh.planning.switches import Planner, with_settings

_LARGEST_BUDGET = 1 << 18


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits.

    Attributes:
        ranks: of the learner, FSDP2 over all of them (full shard).
        tokens: budget of a micro-batch.
        rank_bytes: peak of a rank.
        left: devices that the learner leaves to generators.
        within_node: all ranks are on one node.
    """

    ranks: int
    tokens: int
    rank_bytes: int
    left: int
    within_node: bool


def propose(config: Config, cluster: Cluster, planner: Planner) -> tuple[Proposal | None, int | None]:
    """Looks for layouts.

    Args:
        config: of the run.
        cluster: its devices.
        planner: plans another configuration on the same devices.

    Returns:
        The smallest number of ranks (a power of two) at which a micro-batch of the longest sequence fits, with its
        largest budget. Then the largest budget at the configured ranks. None where nothing fits.
    """
    configured = _largest_budget(config, cluster, planner, config.learner.ranks)
    for ranks in _powers(cluster.count):
        tokens = _largest_budget(config, cluster, planner, ranks)
        if tokens is not None:
            peak = _alone(config, planner, ranks, tokens).learner_peak
            proposal = Proposal(ranks, tokens, peak, cluster.count - ranks, ranks <= cluster.per_node)
            return proposal, configured
    return None, configured


def _largest_budget(config: Config, cluster: Cluster, planner: Planner, ranks: int) -> int | None:
    """The largest power of two, or the longest sequence, that fits a rank which shares its device with no generator."""
    best = None
    longest = config.rollout.context_tokens
    for tokens in sorted({longest, *(size for size in _powers(_LARGEST_BUDGET) if size > longest)}):
        try:
            peak = _alone(config, planner, ranks, tokens).learner_peak
        except ConfigError:
            return best
        if peak + cluster.reserve(1) > cluster.memory:
            return best
        best = tokens
        changed = with_settings(config, {"learner.ranks": ranks, "learner.batch.tokens_per_micro_batch": tokens})
        if micro_batch(changed)[0] < tokens:
            # A rank's whole part of a step is smaller.
            return best
    return best


def _alone(config: Config, planner: Planner, ranks: int, tokens: int) -> Plan:
    settings: dict[str, object] = {
        "learner.ranks": ranks,
        "learner.batch.tokens_per_micro_batch": tokens,
        "rollout.replicas": 0,
    }
    if config.learner.devices is not None:
        settings |= {"learner.devices": "null"}
    return planner(with_settings(config, settings))


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
