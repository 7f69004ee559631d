"""The plan: the memory of every role, generator and host, and what does not fit. Arithmetic; models are read before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from rollmesh.planning.generation import GeneratorMemory, generator_memory
from rollmesh.planning.host import generator_host, learner_host
from rollmesh.planning.placement import Placement, place
from rollmesh.planning.shape import BlockCosts, ModelShape
from rollmesh.planning.training import (
    LogitRoom,
    Moments,
    Phase,
    RoleSetup,
    inputs_on_host,
    on_host,
    phases,
    resting,
    staged,
)

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VALUE_MODEL = "value_model"


class Models(Protocol):
    """Models by role, read from their configurations."""

    def shape(self, role: str) -> ModelShape:
        """The sizes of a role's model."""

    def costs(self, role: str, dtype: str, sp: int) -> tuple[BlockCosts, ...]:
        """The costs of its blocks in a compute dtype, for the tokens of one of `sp` processes that divide them."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One model of the learner on one rank."""

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
class DeviceUse:
    """A device with all of its users.

    Attributes:
        name: of the device, and of its users.
        users: bytes by user, at the peak.
        reserve: bytes that are kept free.
        memory: of the device.
    """

    name: str
    users: dict[str, int]
    reserve: int
    memory: int

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return sum(self.users.values()) + self.reserve

    @property
    def fits(self) -> bool:
        """True where they are there."""
        return self.needed <= self.memory


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
        problems: what does not fit, in words.
    """

    cluster: Cluster
    placement: Placement
    roles: tuple[RolePlan, ...]
    learner_peak: int
    generator: GeneratorMemory | None
    devices: tuple[DeviceUse, ...]
    host: dict[str, int]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True where nothing is in the way."""
        return not self.problems

    @property
    def over(self) -> int:
        """Bytes that are missing, over all different uses of a device."""
        return sum(max(0, use.needed - use.memory) for use in self.devices)


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
    travelling = _BYTES[config.model.dtype]
    on_cuda = _device_of(config.rollout.device, cluster) == "cuda"
    beside = peak if placement.shared else 0
    generator = None
    if config.rollout.replicas:
        generator = generator_memory(
            config.rollout,
            shape,
            travelling,
            cluster.memory,
            cuda=on_cuda,
            beside=beside + cluster.reserve(placement.processes),
            sharing=placement.generators_per_device,
        )
    host = _host(config, cluster, plans, shape, travelling)
    uses = tuple(_uses(config, cluster, placement, peak, generator, host))
    problems = [*placement.problems, *_problems(uses, generator, config)]
    return Plan(cluster, placement, plans, peak, generator, uses, host, tuple(problems))


def _setup(config: Config, cluster: Cluster, role: ModelRole, models: Models) -> RoleSetup:
    learner = config.learner
    device = _device_of(learner.device, cluster)
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
        compute_bytes=_BYTES[dtype],
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
    moment = 1 if optimizer.state_dtype == "8bit" else _BYTES[optimizer.state_dtype]
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


def _device_of(setting: DeviceName, cluster: Cluster) -> Literal["cpu", "cuda"]:
    return "cuda" if cluster.cuda and setting != "cpu" else "cpu"


def _host(
    config: Config, cluster: Cluster, roles: Sequence[RolePlan], shape: ModelShape, travelling: int
) -> dict[str, int]:
    ranks_here = math.ceil(config.learner.ranks / cluster.nodes) if cluster.cuda else config.learner.ranks
    parts = learner_host(config, shape, travelling)
    for name, nbytes_of in (("copy for checkpoints", staged), ("offloaded roles", on_host)):
        if nbytes := ranks_here * sum(nbytes_of(role.setup) for role in roles):
            parts[name] = nbytes
    if inputs := ranks_here * max(inputs_on_host(role.setup) for role in roles):
        parts["offloaded activations"] = inputs
    for name, nbytes in generator_host(config, shape, travelling, same_node=cluster.nodes == 1).items():
        parts[name] = nbytes * math.ceil(config.rollout.replicas / cluster.nodes)
    return parts


def _uses(
    config: Config,
    cluster: Cluster,
    placement: Placement,
    peak: int,
    generator: GeneratorMemory | None,
    host: Mapping[str, int],
) -> list[DeviceUse]:
    memory = cluster.memory
    if not cluster.cuda:
        # One memory for all of a node's processes, and for what they share.
        ranks = math.ceil(config.learner.ranks / cluster.nodes)
        replicas = math.ceil(config.rollout.replicas / cluster.nodes)
        users = {f"learner, {ranks} rank(s)": ranks * peak, "versions and copies": sum(host.values())}
        if generator is not None:
            users[f"{replicas} generator(s)"] = replicas * generator.total
        return [DeviceUse("node", users, cluster.reserve(ranks + replicas), memory)]
    uses = []
    learner, generators = _device_of(config.learner.device, cluster), _device_of(config.rollout.device, cluster)
    share = {} if generator is None else {"generator": placement.generators_per_device * generator.total}
    if learner == "cuda":
        users = {"learner": peak} | (share if placement.shared and generators == "cuda" else {})
        uses.append(DeviceUse(" and ".join(users), users, cluster.reserve(placement.processes), memory))
    if share and generators == "cuda" and not placement.shared:
        uses.append(DeviceUse("generator", share, cluster.reserve(placement.generators_per_device), memory))
    return uses


def _problems(uses: Sequence[DeviceUse], generator: GeneratorMemory | None, config: Config) -> list[str]:
    gib = 1 << 30
    found = [
        f"{use.name}: {use.needed / gib:.1f} GiB are needed, the reserve included, and a device has "
        f"{use.memory / gib:.1f}"
        for use in uses
        if not use.fits
    ]
    if generator is not None and generator.full_sequences < 1:
        found.append(
            f"generator: its KV cache has room for {generator.kv_tokens} tokens, less than one sequence of "
            f"{config.rollout.context_tokens}"
        )
    return found
