"""A layout and a micro-batch size for the learner: the smallest number of ranks, and the largest budget, that fit.

Megatron's engine has several divisions to choose from. If hosts are too small for the configured weights, the search
continues with keys that take less of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.megatron.layouts import divisions, in_parallel
from rollmesh.planning.megatron.memory import MegatronSetup
from rollmesh.planning.megatron.schedule import waiting
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.plan import MEGATRON, Plan, micro_batch
from rollmesh.planning.role_memory import RoleSetup
from rollmesh.planning.settings import with_settings
from rollmesh.planning.switches import Planner

_LARGEST_BUDGET = 1 << 18
BUDGET = "learner.batch.tokens_per_micro_batch"
"""The key of the tokens in a micro-batch, at most."""
_MOST_CHOICES = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits: FSDP2 over all of its ranks (full shard), or the least division of Megatron's engine.

    Attributes:
        ranks: of the learner.
        division: of the actor over them, in words.
        parallel: keys of `learner.parallel` that are not 1, of Megatron's engine.
        settings: the keys that make it, those alone that the configuration has otherwise.
        rank_bytes: peak of a rank.
        left: devices that the learner leaves to generators.
        nodes: over which they are divided.
    """

    ranks: int
    division: str
    parallel: dict[str, int]
    settings: dict[str, Any]
    rank_bytes: int
    left: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A division of the configured ranks, or of those of the smallest layout.

    Attributes:
        ranks: of the learner.
        parallel: keys of `learner.parallel` that are not 1.
        dp: data-parallel ranks.
        rank_bytes: peak of a rank, without generators.
        micro_batches: of a data-parallel rank's optimizer step, at most.
        waiting: see `schedule.waiting`.
    """

    ranks: int
    parallel: dict[str, int]
    dp: int
    rank_bytes: int
    micro_batches: int
    waiting: float


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search for layouts.

    Attributes:
        proposal: the smallest number of ranks that fit a micro-batch of the longest sequence: a power of two times the
            ranks that divide a sequence. It comes with its largest budget; None: none fits.
        largest_budget: of the configured layout; None: none fits.
        obstacles: without a proposal, what does not fit at the layout that comes nearest, in words.
    """

    proposal: Proposal | None
    largest_budget: int | None
    obstacles: tuple[str, ...] = ()


def propose(config: Config, cluster: Cluster, planner: Planner) -> Search:
    """Looks for layouts.

    Args:
        config: of the run.
        cluster: its devices.
        planner: plans another configuration on the same devices.
    """
    configured = _largest_budget(config, {}, planner)
    proposal = _smallest(config, cluster, planner, {})
    if proposal is not None:
        return Search(proposal, configured)
    nearest = _nearest(config, cluster, planner)
    if nearest is None:
        key, parts = _division_of_sequences(config)
        obstacle = f"learner.parallel.{key} is {parts}, and there are {cluster.count} device(s)"
        return Search(None, configured, (obstacle,))
    if not any(use.problem for use in nearest.devices):
        for fewer in _fewer_on_hosts(config):
            if (proposal := _smallest(config, cluster, planner, fewer)) is not None:
                return Search(proposal, configured)
    actor, placement = nearest.roles[0].setup, nearest.placement
    layout = f"{placement.ranks} rank(s) on {placement.learner_nodes} node(s)"
    if isinstance(actor, MegatronSetup):
        layout += f", {actor.division}"
    return Search(None, configured, tuple(f"{layout}: {problem}" for problem in nearest.problems))


def choices(config: Config, smallest: dict[str, Any] | None, planner: Planner) -> tuple[Choice, ...]:
    """The least divisions that fit their devices, whatever hosts do; empty with another engine.

    Args:
        config: of the run.
        smallest: settings of the smallest layout, for the case that no division of the configured ranks fits.
        planner: plans another configuration on the same devices.
    """
    alone = with_settings(config, {"rollout.replicas": 0})
    found = tuple(islice(_fitting(alone, planner), _MOST_CHOICES))
    if found or smallest is None:
        return found
    return tuple(islice(_fitting(with_settings(alone, smallest), planner), _MOST_CHOICES))


def rank_counts(config: Config, cluster: Cluster) -> Iterator[int]:
    """Numbers of ranks that the configured division of sequences divides, up to the devices; the smallest first."""
    _, parts = _division_of_sequences(config)
    return (power * parts for power in _powers(cluster.count // parts))


def _fitting(config: Config, planner: Planner) -> Iterator[Choice]:
    plan = planner(config)
    actor, placement = plan.roles[0].setup, plan.placement
    if not isinstance(actor, MegatronSetup):
        return
    for keys in divisions(config.learner.parallel, placement.ranks, placement.ranks_per_node, actor.model.facts):
        tried = planner(with_settings(config, in_parallel(keys)))
        setup = tried.roles[0].setup
        if tried.on_devices and isinstance(setup, MegatronSetup):
            sizes, count = setup.sizes, setup.micro_batches
            yield Choice(placement.ranks, setup.sizes_given, sizes.dp, tried.learner_peak, count, waiting(sizes, count))


def _smallest(config: Config, cluster: Cluster, planner: Planner, more: dict[str, Any]) -> Proposal | None:
    """The smallest layout that fits, with other keys in addition."""
    for ranks in rank_counts(config, cluster):
        if not _possible(config, ranks, cluster, planner):
            continue
        for nodes in node_counts(cluster, ranks):
            for layout in _layouts(config, ranks, nodes, planner):
                settings = more | layout
                tokens = _largest_budget(config, settings, planner)
                if tokens is not None:
                    return _proposal(config, cluster, planner, settings | {BUDGET: tokens})
    return None


def _proposal(config: Config, cluster: Cluster, planner: Planner, settings: dict[str, Any]) -> Proposal:
    plan = _alone(config, settings, planner)
    placement, actor = plan.placement, plan.roles[0].setup
    return Proposal(
        placement.ranks,
        actor.division,
        sizes_of(actor),
        settings,
        plan.learner_peak,
        cluster.count - placement.ranks,
        placement.learner_nodes,
    )


def _nearest(config: Config, cluster: Cluster, planner: Planner) -> Plan | None:
    """The layout that fits its devices and takes the least of its hosts, although it does not fit.

    Where none fits its devices, the one that takes the least of them.

    None: no number of ranks can be divided over the devices.
    """
    counts = list(rank_counts(config, cluster))
    if config.learner.engine == MEGATRON:
        # It has many divisions of each number.
        counts = counts[-1:]
    plans = [
        _alone(config, layout | {BUDGET: config.rollout.context_tokens}, planner)
        for ranks in counts
        for nodes in node_counts(cluster, ranks)
        for layout in _layouts(config, ranks, nodes, planner)
    ]
    if roomy := [plan for plan in plans if not any(use.problem for use in plan.devices)]:
        return min(roomy, key=lambda plan: sum(plan.host.values()))
    return min(plans, key=lambda plan: plan.learner_peak, default=None)


def _fewer_on_hosts(config: Config) -> Iterator[dict[str, Any]]:
    """Keys with which versions take less of a host, one more each time."""
    weights = config.weights
    keys: dict[str, Any] = {}
    for key, value, applies in (
        ("model.dtype", "bfloat16", config.model.dtype == "float32"),
        ("weights.chain", 1, weights.encoding != "full" and weights.chain > 1),
        ("weights.keep_versions", 1, config.kept_versions > 1),
    ):
        if applies:
            keys = keys | {key: value}
            yield keys


def _possible(config: Config, ranks: int, cluster: Cluster, planner: Planner) -> bool:
    """False where no division of Megatron's engine can fit so many ranks; they need not be tried then."""
    actor = planner(config).roles[0].setup
    if not isinstance(actor, MegatronSetup):
        return True
    return actor.least * actor.sizes.processes <= ranks * cluster.memory


def _division_of_sequences(config: Config) -> tuple[str, int]:
    """Key and value of the ranks that divide each sequence of the actor."""
    key = "cp" if config.learner.engine == MEGATRON else "sp"
    return key, getattr(config.learner.parallel, key) or 1


def _layouts(config: Config, ranks: int, nodes: int, planner: Planner) -> Iterator[dict[str, Any]]:
    """Settings of layouts: FSDP2 over all ranks, or every division of Megatron's engine, the least one first."""
    learner, actor = config.learner, planner(config).roles[0].setup
    ours = [name for name in learner.roles if learner.engine_of(name) == learner.engine]
    rest: dict[str, Any] = {
        f"learner.roles.{name}.parallel": None for name in ours if learner.roles[name].parallel is not None
    }
    if config.placement.devices.learner is not None:
        rest["placement.devices.learner"] = None
    found: Iterable[dict[str, Any]] = [
        {key: None for key in ("shards", "dp") if getattr(learner.parallel, key) is not None}
    ]
    if isinstance(actor, MegatronSetup):
        found = divisions(learner.parallel, ranks, ranks // nodes, actor.model.facts)
    for keys in found:
        yield spread(config, ranks, nodes) | in_parallel(keys) | rest


def _largest_budget(config: Config, settings: dict[str, Any], planner: Planner) -> int | None:
    """The largest power of two, or the longest sequence, that fits ranks with devices of their own."""
    best = None
    longest = config.rollout.context_tokens
    for tokens in sorted({longest, *(size for size in _powers(_LARGEST_BUDGET) if size > longest)}):
        tried = settings | {BUDGET: tokens}
        if not _alone(config, tried, planner).has_room:
            return best
        best = tokens
        if micro_batch(with_settings(config, tried))[0] < tokens:
            # A rank's whole part of a step is smaller.
            return best
    return best


def _alone(config: Config, settings: dict[str, Any], planner: Planner) -> Plan:
    return planner(with_settings(config, settings | {"rollout.replicas": 0}))


def sizes_of(setup: RoleSetup) -> dict[str, int]:
    """Keys of `learner.parallel` that are not 1, of a model that Megatron's engine divides."""
    return setup.sizes_given if isinstance(setup, MegatronSetup) else {}


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
