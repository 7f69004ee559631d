"""Expert parallelism: each rank has some experts of every layer, and FSDP2 shards these over the ranks that share them.

Neighbours have different experts. Those with the same place among their neighbours have the same ones, and divide them
by rows, as FSDP2 divides all else over all ranks. So a rank gathers a part of a layer's experts and not all of them.

Invariant: a parameter of experts is a DTensor of its full shape. Code that loads, exports and saves parameters need
not know of the division.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rollmesh.learner.engines.fsdp2.experts.exchange import ExpertExchange
from rollmesh.learner.engines.fsdp2.experts.modules import ExpertLayer, why_undividable
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import ConfigError

KEY = "learner.parallel.ep"
EXPERTS = "experts"
"""The dimension of the mesh along which ranks have different experts."""


def expert_mesh(world: World, shards: int | None, ep: int) -> DeviceMesh:
    """The mesh of experts; collective.

    Args:
        world: the ranks.
        shards: ranks that hold a model together, a multiple of `ep`; None: all.
        ep: ranks that hold the experts of a layer together.

    Returns:
        [copies, shards / ep, ep], its last dimension named `EXPERTS`; without the first where there is one copy.
    """
    shards = shards or world.processes
    shape = {"copies": world.processes // shards, "shards": shards // ep, EXPERTS: ep}
    if shape["copies"] == 1:
        del shape["copies"]

    ranks = torch.arange(world.processes).view(*shape.values())

    def make() -> DeviceMesh:
        # One group after another, in all ranks alike. Those that torch would make have no deadline of ours.
        groups = [_group_along(ranks, place, world) for place in range(ranks.dim())]
        return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=tuple(shape))

    return world.keep((EXPERTS, world.device.type, *shape.values()), make)


def _group_along(ranks: Tensor, dimension: int, world: World) -> dist.ProcessGroup:
    rows = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(rows, timeout=world.timeout)[0]
    return group


def divide_experts(layers: Sequence[ExpertLayer], mesh: DeviceMesh, name: str) -> None:
    """Leaves this rank its part of the experts, in place, and has it exchange tokens with the others.

    Args:
        layers: of the model; their parameters need no memory yet.
        mesh: of `expert_mesh`.
        name: of the model, for errors.

    Raises:
        ConfigError: experts of the model cannot be divided so.
    """
    parts = mesh[EXPERTS]
    for layer in layers:
        if why := why_undividable(layer):
            raise ConfigError(f"the experts of model {name!r} cannot be divided: {why}", hint=f"set {KEY}: 1")
        _divide(layer.module, layer.experts // parts.size(), parts)


def _divide(module: Any, experts: int, parts: DeviceMesh) -> None:
    first = parts.get_local_rank() * experts
    for name, whole in list(module.named_parameters(recurse=False)):
        own = DTensor.from_local(whole.detach()[first : first + experts], parts, [Shard(0)], run_check=False)
        module.register_parameter(name, nn.Parameter(own, requires_grad=whole.requires_grad))
    module.num_experts = experts
    exchange = ExpertExchange(parts.get_group())
    # It has the code and the sizes of the experts, and gets their parameters for each call.
    plain: Any = copy(module)

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = {name: parameter.to_local() for name, parameter in module.named_parameters(recurse=False)}
        for local in own.values():
            if local.requires_grad:
                # FSDP2 divides by the ranks of its mesh, each of which has the sum over the tokens of a whole group.
                local.register_hook(lambda gradient: gradient / exchange.parts)

        def compute(rows: Tensor, numbers: Tensor) -> Tensor:
            plain._parameters = own
            # Not called as a module: hooks are of the one that is divided.
            results: Tensor = plain.forward(rows, numbers.unsqueeze(-1), rows.new_ones(len(rows), 1))
            plain._parameters = {}
            return results

        return exchange.computed(hidden, chosen, weights, experts, compute)

    module.forward = forward
