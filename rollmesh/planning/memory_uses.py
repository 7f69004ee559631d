"""The uses of devices, hosts and `/dev/shm` in a plan: what each is asked to hold, and if it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster, size_text
from rollmesh.planning.generator_memory import GeneratorMemory
from rollmesh.planning.host import IN_SHM
from rollmesh.planning.placement import Placement

SHM = "shared memory (/dev/shm) of the learner's node"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A memory with all of its users.

    Attributes:
        name: of a device, by its users; of a host's memory.
        users: bytes by user, at the peak.
        reserve: bytes that are kept free.
        memory: bytes that there are.
        required: a run cannot do without; else it takes another way where they do not fit.
    """

    name: str
    users: dict[str, int]
    reserve: int
    memory: int
    required: bool = True

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return sum(self.users.values()) + self.reserve

    @property
    def fits(self) -> bool:
        """True where they are there."""
        return self.needed <= self.memory

    def to_json(self) -> dict[str, Any]:
        """For programs, in bytes."""
        return asdict(self) | {"needed": self.needed, "fits": self.fits}

    @property
    def problem(self) -> str:
        """The obstacle to a run, in words; empty without one."""
        if self.fits or not self.required:
            return ""
        return (
            f"{self.name}: {size_text(self.needed)} are needed, the reserve included, and there are "
            f"{size_text(self.memory)}"
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """All users of memory.

    Attributes:
        peak: bytes of a rank.
        generator: on one of its devices; None without generators.
        bucket: of weights on their way, in bytes.
        host, away: host memory by component, of the first rank's node and of a node of generators alone.
        learner_on_cuda, generators_on_cuda: they compute there.
    """

    peak: int
    generator: GeneratorMemory | None
    bucket: int
    host: Mapping[str, int]
    away: Mapping[str, int]
    learner_on_cuda: bool
    generators_on_cuda: bool


def device_uses(cluster: Cluster, placement: Placement, demand: Demand) -> Iterator[MemoryUse]:
    """The uses of devices, one for every different use; where sides take turns, one for each of their turns."""
    if not cluster.cuda:
        yield from _uses_of_cpus(cluster, placement, demand)
        return
    generator = demand.generator if demand.generators_on_cuda else None
    share = {"generator": placement.generators_per_device * generator.total} if generator else {}
    alone = MemoryUse("generator", share, cluster.reserve(placement.generators_per_device), cluster.memory)
    if demand.learner_on_cuda and generator and placement.in_turns:
        yield from _turns(cluster, placement, demand, generator)
        if placement.apart:
            yield alone
        return
    if demand.learner_on_cuda:
        users = {"learner": demand.peak} | (share if placement.shared else {})
        yield MemoryUse(" and ".join(users), users, cluster.reserve(placement.processes), cluster.memory)
    if share and not placement.shared:
        yield alone


def _turns(cluster: Cluster, placement: Placement, demand: Demand, generator: GeneratorMemory) -> Iterator[MemoryUse]:
    """The turns of a device that is shared: its use is the largest of them. The processes of both sides stay."""
    reserve, count = cluster.reserve(placement.processes), placement.generators_per_device
    asleep = {"sleeping generator": count * generator.asleep} if generator.asleep else {}
    weights = count * (generator.weights + demand.bucket)
    yield MemoryUse("learner in its turn", {"learner": demand.peak} | asleep, reserve, cluster.memory)
    yield MemoryUse("generator in its turn", {"generator": count * generator.total}, reserve, cluster.memory)
    # The learner has given its memory back before weights are loaded, and KV caches are made after that.
    yield MemoryUse("both in a swap", {"weights and a bucket": weights} | asleep, reserve, cluster.memory)


def _uses_of_cpus(cluster: Cluster, placement: Placement, demand: Demand) -> Iterator[MemoryUse]:
    """One memory for all of a node's processes, and for what they share."""
    ranks, generators, sleeping = placement.ranks_per_node, placement.on_learner_nodes, placement.in_turns
    learner, copies = _of_ranks(placement, demand.peak), {"versions and copies": sum(demand.host.values())}
    reserve = cluster.reserve(ranks + generators)
    if sleeping and demand.generator is not None:
        awake = _of_generators(generators - sleeping, demand.generator)
        yield MemoryUse("node in the learner's turn", learner | awake | copies, reserve, cluster.memory)
        # The learner's state is in files then.
        users = _of_generators(generators, demand.generator) | copies
        yield MemoryUse("node in the generators' turn", users, reserve, cluster.memory)
    else:
        users = learner | _of_generators(generators, demand.generator) | copies
        yield MemoryUse("node", users, reserve, cluster.memory)
    if placement.elsewhere:
        users = _of_generators(placement.elsewhere, demand.generator) | {"versions": sum(demand.away.values())}
        yield MemoryUse("node of generators", users, cluster.reserve(placement.elsewhere), cluster.memory)


def host_uses(cluster: Cluster, placement: Placement, demand: Demand, *, needs_shm: bool) -> Iterator[MemoryUse]:
    """The memory of a node of the learner and of a node of generators, and `/dev/shm`; a CPU's memory is a device.

    Args:
        cluster: the nodes.
        placement: of ranks and generators.
        demand: of memory.
        needs_shm: weights do not travel in another way where there is too little of it.
    """
    host, each = cluster.host, max(placement.devices_per_generator, 1)
    if cluster.cuda:
        users, away = dict(demand.host), dict(demand.away)
        if not demand.learner_on_cuda:
            users |= _of_ranks(placement, demand.peak)
        if not demand.generators_on_cuda:
            users |= _of_generators(placement.on_learner_nodes, demand.generator)
            away |= _of_generators(placement.elsewhere, demand.generator)
        processes = placement.ranks_per_node + placement.on_learner_nodes * each
        yield MemoryUse("host of the learner", users, cluster.host_reserve(processes), host.memory)
        if placement.elsewhere:
            yield MemoryUse("host of generators", away, cluster.host_reserve(placement.elsewhere * each), host.memory)
    if IN_SHM in demand.host:
        yield MemoryUse(SHM, {IN_SHM: demand.host[IN_SHM]}, 0, host.shm, required=needs_shm)


def _of_ranks(placement: Placement, peak: int) -> dict[str, int]:
    ranks = placement.ranks_per_node
    return {f"learner, {ranks} rank(s)": ranks * peak}


def _of_generators(count: int, generator: GeneratorMemory | None) -> dict[str, int]:
    return {f"{count} generator(s)": count * generator.total} if generator is not None and count else {}


def problems(uses: Sequence[MemoryUse], generator: GeneratorMemory | None, config: Config) -> Iterator[str]:
    """All obstacles, in words."""
    yield from (use.problem for use in uses if use.problem)
    if generator is not None and generator.full_sequences < 1:
        yield (
            f"generator: its KV cache has room for {generator.kv_tokens} tokens, less than one sequence of "
            f"{config.rollout.context_tokens}"
        )
