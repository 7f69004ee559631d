"""The plan: the memory of every role, generator and host, and what does not fit. Arithmetic; models are read before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.engines.fsdp2.output.layer import TILES
from rollmesh.learner.engines.fsdp2.preparation.shard_mesh import check_shards
from rollmesh.learner.engines.fsdp2.ulysses.division import check_division
from rollmesh.learner.engines.interface import ACTOR
from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.config.learner import OptimizerSection, RoleSection
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.generator_memory import GeneratorMemory, generator_memory
from rollmesh.planning.host import generators_node, learner_node
from rollmesh.planning.learner_memory import (
    LogitRoom,
    Moments,
    Phase,
    RoleSetup,
    phases,
    resting,
)
from rollmesh.planning.memory_uses import Demand, MemoryUse, device_uses, host_uses, problems
from rollmesh.planning.placement import Placement, place
from rollmesh.planning.shape import BlockCosts, ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VALUE_MODEL = "value_model"


class Models(Protocol):
    """Models by role, read from their configurations."""

    def shape(self, role: str) -> ModelShape:
        """The sizes of a role's model."""

    def costs(self, role: str, dtype: str, sp: int) -> tuple[BlockCosts, ...]:
        """The costs of its blocks in a compute dtype, for the tokens of one of `sp` processes that divide them."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The memory of one of the learner's models on one rank."""

    setup: RoleSetup
    phases: tuple[Phase, ...]

    @property
    def resting(self) -> int:
        """Bytes between its uses."""
        return sum(resting(self.setup).values())

    @property
    def largest(self) -> Phase:
        """The phase of its largest sum."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a run.

    Attributes:
        cluster: its devices.
        placement: of ranks and generators.
        roles: models of the learner, the actor first.
        learner_peak: bytes of a rank at the peak, all roles together.
        generator: a generator on one of its devices; None: the run has none here.
        devices: one for every different use of a device.
        host: bytes of host memory by component, on the first rank's node.
        hosts: the memory of nodes, and `/dev/shm`.
        problems: what does not fit, in words.
        notices: valid settings that take more memory and time than others.
    """

    cluster: Cluster
    placement: Placement
    roles: tuple[RolePlan, ...]
    learner_peak: int
    generator: GeneratorMemory | None
    devices: tuple[MemoryUse, ...]
    host: dict[str, int]
    hosts: tuple[MemoryUse, ...]
    problems: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True where nothing is in the way."""
        return not self.problems

    @property
    def has_room(self) -> bool:
        """True where devices and hosts hold what they have to."""
        return not any(use.problem for use in (*self.devices, *self.hosts))


def make_plan(config: Config, cluster: Cluster, roles: Sequence[ModelRole], models: Models) -> Plan:
    """Plans a run.

    Args:
        config: of the run.
        cluster: its devices.
        roles: models that the algorithm needs in addition to the actor.
        models: of all roles.
    """
    placement = place(config, cluster)
    plans = tuple(
        RolePlan(setup, tuple(phases(setup)))
        for setup in (_setup(config, cluster, role, models) for role in (ModelRole(ACTOR, trained=True), *roles))
    )
    at_rest = sum(role.resting for role in plans)
    peak = max(at_rest - role.resting + role.largest.total for role in plans)
    shape = models.shape(ACTOR)
    travelling = DTYPE_BYTES[config.model.dtype]
    on_cuda = device_of(config.rollout.device, cluster) == "cuda"
    taken = peak if placement.shared else 0
    generator = None
    if config.rollout.replicas:
        generator = generator_memory(
            config.rollout,
            shape,
            travelling,
            cluster.memory,
            cuda=on_cuda,
            taken_by_others=taken + cluster.reserve(placement.processes),
            sharing=placement.generators_per_device,
        )
    setups = [role.setup for role in plans]
    host = learner_node(config, setups, shape, travelling, placement)
    away = generators_node(config, shape, travelling, placement)
    demand = Demand(peak, generator, host, away, device_of(config.learner.device, cluster) == "cuda", on_cuda)
    devices = tuple(device_uses(cluster, placement, demand))
    # With `auto` weights travel over gRPC where shared memory is too small.
    hosts = tuple(host_uses(cluster, placement, demand, needs_shm=config.weights.transport == "shm"))
    found = (*placement.problems, *problems((*devices, *hosts), generator, config))
    return Plan(
        cluster, placement, plans, peak, generator, devices, host, hosts, found, tuple(_notices(config, cluster))
    )


def _notices(config: Config, cluster: Cluster) -> Iterator[str]:
    if cluster.cuda and config.model.dtype == "float32":
        yield (
            "weights travel, and generators compute, in float32 (model.dtype, the default): on GPUs "
            "--model.dtype=bfloat16 takes half of that memory and is faster"
        )


def _setup(config: Config, cluster: Cluster, role: ModelRole, models: Models) -> RoleSetup:
    learner = config.learner
    device = device_of(learner.device, cluster)
    dtype, recompute = learner.compute_on(device)
    shape = models.shape(role.name)
    section = learner.roles.get(role.name) or RoleSection()
    sp = learner.parallel.sp
    check_division(sp, heads=shape.heads, processes=learner.ranks, name=shape.name)
    tokens, micro_batches = micro_batch(config)
    shards = learner.parallel.shards or learner.ranks
    check_shards(shards, learner.ranks)
    return RoleSetup(
        name=role.name,
        shape=shape.as_value_model() if role.kind == _VALUE_MODEL else shape,
        costs=models.costs(role.name, dtype, sp),
        trained=role.trained,
        shards=shards,
        sharded=learner.ranks > 1 or dtype != "float32",
        compute_bytes=DTYPE_BYTES[dtype],
        recompute=role.trained and recompute,
        offload=device == "cuda" and (learner.memory.offload_params if role.trained else section.offload),
        offload_optimizer=device == "cuda" and learner.memory.offload_optimizer,
        offload_gradients=device == "cuda" and learner.memory.offload_gradients,
        tokens=math.ceil(tokens / sp),
        sp=sp,
        micro_batches=micro_batches,
        logits=LogitRoom(learner.memory.logits_mib << 20, math.prod(TILES[device]), TILES[device][0]),
        moments=_moments(section.optimizer or learner.optimizer),
        sync_once=learner.gradient_sync == "step",
        host_inputs=learner.memory.offload_activations and device == "cuda",
        reshard=learner.memory.reshard_after_forward or not role.trained,
    )


def _moments(optimizer: OptimizerSection) -> Moments:
    if optimizer.name == "muon":
        # One momentum, for matrices of the layers alone.
        return Moments(matrices=4)
    # Scales are a 64th of what codes of 8 bits take.
    moment = 1 if optimizer.state_dtype == "8bit" else DTYPE_BYTES[optimizer.state_dtype]
    return Moments(2 * moment, 2 * moment)


def micro_batch(config: Config) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and micro-batches of a data-parallel rank's optimizer step, both at most."""
    learner, batch, rollout = config.learner, config.learner.batch, config.rollout
    longest = rollout.context_tokens
    groups = math.ceil(batch.groups / batch.minibatches)
    sequences = math.ceil(groups * rollout.n * learner.parallel.sp / learner.ranks)
    share = sequences * longest
    tokens = max(min(batch.tokens_per_micro_batch, share), longest)
    return tokens, math.ceil(share / tokens)


def device_of(setting: DeviceName, cluster: Cluster) -> Literal["cpu", "cuda"]:
    """The device on which a service computes."""
    return "cuda" if cluster.cuda and setting != "cpu" else "cpu"
