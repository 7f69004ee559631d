"""The devices of ranks and generators, node by node, by the launcher's own rule, as numbers of users per device.

Ranks are divided evenly over `learner.distributed.nodes` nodes, and so are generators that take turns with them. A
generator's engine is on one node. Generators with devices of their own fill the nodes without ranks first, as in
deploy/slurm, and then what ranks leave on theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.launcher.placement.devices import assign_devices
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.mesh.config.derived.generator_places import devices_per_generator, generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.settings import flags

RENDEZVOUS = "HOST:29500"
"""Stands for the address of node 0, which no plan can know."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Users of nodes and devices.

    Attributes:
        ranks: of the learner, over all nodes.
        learner_nodes: nodes that have ranks.
        generators: number of generators.
        devices_per_generator: of each.
        on_learner_nodes: generators on each of the learner's nodes, at most.
        in_turns: those of them that sleep while the learner trains.
        elsewhere: generators on each of the other nodes, at most.
        rests_on_host: the learner's state is in memory of the host in the generators' turn; on a CPU it is in files.
        shared: generators use devices of ranks.
        apart: generators have devices of their own.
        generators_per_device: at most.
        processes: of a device, at most.
        problems: the reasons why it is impossible, in words.
    """

    ranks: int
    learner_nodes: int
    generators: int
    devices_per_generator: int
    on_learner_nodes: int
    elsewhere: int
    in_turns: int = 0
    rests_on_host: bool = False
    shared: bool = False
    apart: bool = False
    generators_per_device: int = 1
    processes: int = 1
    problems: tuple[str, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each of the learner's nodes."""
        return self.ranks // self.learner_nodes


def place(config: Config, cluster: Cluster) -> Placement:
    """Places a run on a cluster; an impossible placement has `problems`, and is planned all the same."""
    learner, rollout = config.learner, config.rollout
    nodes, each = learner.distributed.nodes, devices_per_generator(rollout)
    on_learner_nodes, elsewhere = _generators_by_node(config, cluster, each)
    problems = tuple(_problems_of_nodes(config, cluster, each))
    in_turns = math.ceil(_sharing(config) / nodes)
    placed = Placement(
        learner.ranks,
        nodes,
        len(generator_places(config)),
        each,
        on_learner_nodes,
        elsewhere,
        in_turns,
        rests_on_host=bool(in_turns) and cluster.cuda and learner.device != "cpu",
        problems=problems,
    )
    if problems:
        return placed
    # The launcher's rule is for one machine: one of the learner's, with its part of ranks and generators.
    hybrid = config.placement.mode == "hybrid"
    own = on_learner_nodes - in_turns if hybrid else on_learner_nodes
    part = config.model_copy(
        update={
            "learner": learner.model_copy(update={"ranks": placed.ranks_per_node}),
            "rollout": rollout.model_copy(update={"replicas": own}),
            "placement": config.placement.model_copy(update={"shared_generators": in_turns} if hybrid else {}),
        }
    )
    seen = cluster.per_node if cluster.cuda else 0
    visible = VisibleDevices(tuple(str(number) for number in range(seen)), seen, seen)
    try:
        plan = assign_devices(part, visible)
    except ConfigError as error:
        where = "on a node of the learner: " if cluster.nodes > 1 else ""
        return replace(placed, problems=(f"{where}{error}",))
    users = Counter(number for devices in plan.generators for number in devices)
    shared = bool(set(users) & set(plan.learner))
    most = max(users.values(), default=1)
    return replace(
        placed,
        shared=shared,
        apart=bool(elsewhere or set(users) - set(plan.learner)),
        generators_per_device=most,
        processes=most + shared,
    )


def _sharing(config: Config) -> int:
    """Generators that take turns with the learner, on all nodes."""
    return sum(place.shares_devices for place in generator_places(config))


def node_counts(cluster: Cluster, ranks: int) -> Iterator[int]:
    """Numbers of nodes over which this many ranks can be divided, a device for each; the smallest first."""
    for nodes in range(math.ceil(ranks / cluster.per_node), cluster.nodes + 1):
        if ranks % nodes == 0:
            yield nodes


def spread(config: Config, ranks: int, nodes: int) -> dict[str, Any]:
    """The keys that divide the learner over this many ranks and nodes, with the node settings of the configuration.

    `RENDEZVOUS` is among them where ranks of several nodes have no address yet.
    """
    distributed = config.learner.distributed
    settings: dict[str, Any] = {"learner.ranks": ranks}
    if distributed.nodes != nodes:
        settings["learner.distributed.nodes"] = nodes
    if nodes > 1 and distributed.rendezvous is None:
        settings["learner.distributed.rendezvous"] = RENDEZVOUS
    return settings


def _generators_by_node(config: Config, cluster: Cluster, each: int) -> tuple[int, int]:
    """Generators on each of the learner's nodes, and on each of the others."""
    nodes = min(config.learner.distributed.nodes, cluster.nodes)
    shared = _sharing(config)
    own = len(generator_places(config)) - shared
    near, others = math.ceil(shared / nodes), cluster.nodes - nodes
    if config.placement.devices.generators is not None:
        # Numbers of devices are those of the machine that starts them all.
        return own + near, 0
    if not others:
        return math.ceil(own / nodes) + near, 0
    if not cluster.cuda or config.rollout.device == "cpu":
        of_each = math.ceil(own / cluster.nodes)
        return of_each + near, of_each
    room = others * (cluster.per_node // each) if each else own
    away = min(own, room)
    return math.ceil((own - away) / nodes) + near, math.ceil(away / others)


def _problems_of_nodes(config: Config, cluster: Cluster, each: int) -> Iterator[str]:
    learner, nodes = config.learner, config.learner.distributed.nodes
    if nodes > cluster.nodes:
        yield f"learner.distributed.nodes is {nodes}, and --nodes {cluster.nodes}"
        return
    if not cluster.cuda:
        return
    ranks = learner.ranks // nodes
    if learner.device != "cpu" and ranks > cluster.per_node:
        wider = next(node_counts(cluster, learner.ranks), None)
        wanted = "" if wider is None else f": set {flags(spread(config, learner.ranks, wider))}"
        yield f"the learner has {ranks} ranks on a node of {cluster.per_node} devices{wanted}"
    if generator_places(config) and config.rollout.device != "cpu" and each > cluster.per_node:
        yield f"a generator's engine takes {each} devices of one node, which has {cluster.per_node}"
