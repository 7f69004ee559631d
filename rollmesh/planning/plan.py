"""The plan: the memory of every role, generator and host, and what does not fit. Arithmetic; models are read before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollmesh.learner.algorithm_requirements import base_roles
from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.engines.fsdp2.parallel_requirements import check_parallel
from rollmesh.learner.engines.interface import ACTOR
from rollmesh.learner.engines.megatron.requirements import resolve_sizes
from rollmesh.learner.engines.megatron.unsupported import check_optimizer, check_settings
from rollmesh.learner.engines.output.layer import TILES
from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.config.learner import OptimizerSection, RoleSection
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import GIB, Cluster
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.generator_memory import GeneratorMemory, generator_memory
from rollmesh.planning.host import generators_node, learner_node
from rollmesh.planning.megatron.memory import MegatronSetup
from rollmesh.planning.megatron.model_sizes import ModelSizes
from rollmesh.planning.memory_uses import Demand, MemoryUse, device_uses, host_uses, problems
from rollmesh.planning.placement import Placement, place
from rollmesh.planning.role_memory import LogitRoom, Moments, Phase, RoleSetup
from rollmesh.planning.shape import BlockCosts, ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MEGATRON = "megatron"
"""The engine of that name; the other one is FSDP2."""
_VALUE_MODEL = "value_model"


class Models(Protocol):
    """Models by role, read from their configurations."""

    def shape(self, role: str) -> ModelShape:
        """The sizes of a role's model."""

    def costs(self, role: str, dtype: str, sp: int) -> tuple[BlockCosts, ...]:
        """The costs of its blocks in a compute dtype, for the tokens of one of `sp` processes that divide them."""

    def sizes(self, role: str) -> ModelSizes:
        """The sizes of a role's model as Megatron's engine divides it."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The memory of one of the learner's models on one rank."""

    setup: RoleSetup
    phases: tuple[Phase, ...]

    @property
    def resting(self) -> int:
        """Bytes between its uses."""
        return sum(self.setup.resting().values())

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
    def on_devices(self) -> bool:
        """True where devices hold what they have to, whatever hosts do."""
        return not (self.placement.problems or any(use.problem for use in self.devices))

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
    shared = base_roles(config, roles)
    own = [role for role in roles if role.name not in shared]
    plans = tuple(
        RolePlan(setup, tuple(setup.phases()))
        for setup in (_setup(config, cluster, role, models) for role in (ModelRole(ACTOR, trained=True), *own))
    )
    at_rest = sum(role.resting for role in plans)
    peak = max(at_rest - role.resting + role.largest.total for role in plans)
    shape = models.shape(ACTOR)
    travelling = DTYPE_BYTES[config.model.dtype]
    on_cuda = device_of(config.rollout.device, cluster) == "cuda"
    taken = peak if placement.shared and not placement.in_turns else 0
    generator = None
    if placement.generators:
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
    learner_on_cuda = device_of(config.learner.device, cluster) == "cuda"
    demand = Demand(peak, generator, config.weights.bucket_bytes, host, away, learner_on_cuda, on_cuda)
    devices = tuple(device_uses(cluster, placement, demand))
    # With `auto` weights travel over gRPC where shared memory is too small.
    hosts = tuple(host_uses(cluster, placement, demand, needs_shm=config.weights.transport == "shm"))
    found = (*placement.problems, *problems((*devices, *hosts), generator, config))
    return Plan(
        cluster, placement, plans, peak, generator, devices, host, hosts, found, tuple(_notices(config, cluster, plans))
    )


def _notices(config: Config, cluster: Cluster, roles: Sequence[RolePlan]) -> Iterator[str]:
    if config.placement.learner_takes_turns and device_of(config.learner.device, cluster) == "cpu":
        gib = config.learner.ranks * sum(role.resting for role in roles) / GIB
        yield f"the learner rests in files, {gib:.1f} GiB over all ranks (placement.rest_dir, else the run's folder)"
    if cluster.cuda and config.model.dtype == "float32":
        yield (
            "weights travel, and generators compute, in float32 (model.dtype, the default): on GPUs "
            "--model.dtype=bfloat16 takes half of that memory and is faster"
        )


def _setup(config: Config, cluster: Cluster, role: ModelRole, models: Models) -> RoleSetup:
    learner = config.learner
    device = device_of(learner.device, cluster)
    cuda = device == "cuda"
    dtype, recompute = learner.compute_on(device)
    shape = models.shape(role.name)
    section = learner.roles.get(role.name) or RoleSection()
    optimizer = section.optimizer or learner.optimizer
    tokens, micro_batches = micro_batch(config, role.name)
    common: dict[str, Any] = {
        "name": role.name,
        "shape": shape.as_value_model() if role.kind == _VALUE_MODEL else shape,
        "trained": role.trained,
        "compute_bytes": DTYPE_BYTES[dtype],
        "recompute": role.trained and recompute,
        "offload": cuda and (learner.memory.offload_params if role.trained else section.offload),
        "offload_optimizer": cuda and learner.memory.offload_optimizer,
        "offload_gradients": cuda and learner.memory.offload_gradients,
        "micro_batches": micro_batches,
        "logits": LogitRoom(learner.memory.logits_mib << 20, math.prod(TILES[device]), TILES[device][0]),
        "moments": _moments(optimizer),
    }
    parallel, key = learner.parallel_of(role.name), learner.parallel_key(role.name)
    if learner.engine_of(role.name) == MEGATRON:
        check_settings(learner)
        check_optimizer(optimizer)
        model = models.sizes(role.name)
        sizes = resolve_sizes(parallel, learner.ranks, model.facts, key=key)
        model = model.as_value_model() if role.kind == _VALUE_MODEL else model
        return MegatronSetup(model=model, sizes=sizes, fused=cuda, tokens=math.ceil(tokens / sizes.cp), **common)
    check_parallel(parallel, heads=shape.heads, processes=learner.ranks, name=shape.name, key=key)
    sp = parallel.sp or 1
    return FsdpSetup(
        costs=models.costs(role.name, dtype, sp),
        ranks=learner.ranks,
        shards=parallel.shards or learner.ranks,
        sharded=learner.ranks > 1 or dtype != "float32",
        tokens=math.ceil(tokens / sp),
        sp=sp,
        sync_once=learner.gradient_sync == "step",
        host_inputs=learner.memory.offload_activations and cuda,
        reshard=learner.memory.reshard_after_forward or not role.trained,
        **common,
    )


def _moments(optimizer: OptimizerSection) -> Moments:
    if optimizer.name == "muon":
        # One momentum, for matrices of the layers alone.
        return Moments(matrices=4)
    # Scales are a 64th of what codes of 8 bits take.
    moment = 1 if optimizer.state_dtype == "8bit" else DTYPE_BYTES[optimizer.state_dtype]
    return Moments(2 * moment, 2 * moment)


def micro_batch(config: Config, role: str = ACTOR) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and micro-batches of a data-parallel rank's optimizer step, both at most.

    Args:
        config: of the run.
        role: whose ranks they are.
    """
    learner, batch, rollout = config.learner, config.learner.batch, config.rollout
    longest = rollout.context_tokens
    groups = math.ceil(batch.groups / batch.minibatches)
    sequences = math.ceil(groups * rollout.n * _together(config, role) / learner.ranks)
    share = sequences * longest
    tokens = max(min(batch.tokens_per_micro_batch, share), longest)
    return tokens, math.ceil(share / tokens)


def _together(config: Config, role: str) -> int:
    """Ranks that compute a micro-batch together."""
    parallel = config.learner.parallel_of(role)
    if config.learner.engine_of(role) == MEGATRON:
        return parallel.tp * parallel.pp * parallel.cp
    return parallel.sp or 1


def device_of(setting: DeviceName, cluster: Cluster) -> Literal["cpu", "cuda"]:
    """The device on which a service computes."""
    return "cuda" if cluster.cuda and setting != "cpu" else "cpu"
