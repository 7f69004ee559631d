"""FSDP2 and recomputation: the preparation of a model before it trains.

A single rank in float32 has nothing to shard and gets the plain model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rollmesh.learner.engines.fsdp2.experts.modules import expert_layers
from rollmesh.learner.engines.fsdp2.output_layer import OutputLayer
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.fsdp2.preparation.recomputation import recompute_blocks

# Children of a model that compute in float32 whatever the rest does.
_FLOAT32 = ("value_head",)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The way in which a model is to be prepared.

    Attributes:
        shard: apply FSDP2; master weights stay float32, computation is in `param_dtype`, gradients reduce in float32.
        param_dtype: compute dtype.
        mesh: to shard over, see `shard_mesh`.
        experts: the mesh of experts where they are divided, see `experts.division`.
        trained: False: no gradients. Parameters without gradient have no master weights beside those in `param_dtype`.
        recompute: compute each block's activations again in the backward pass: all, or `selective`: all but the outputs
            of products and of attention.
        offload_activations: the inputs of blocks that are computed again wait in (pinned) host memory.
        reshard_after_forward: a block's parameters are gathered again for the backward pass; between the two they take
            no memory. Models that are not trained have no such pass, and never keep them.
        tower: a vision part, whose blocks are sharded as well.
    """

    shard: bool
    param_dtype: torch.dtype
    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    trained: bool = True
    recompute: bool | Literal["selective"] = False
    offload_activations: bool = False
    reshard_after_forward: bool = True
    tower: nn.Module | None = None


def prepare(model: nn.Module, how: Preparation) -> None:
    """Shards every transformer block, the embedding, the output layer, and then the rest, in place.

    Each of them is gathered, and its gradient reduced, by itself: a device holds one or two of them whole at a time.

    Args:
        model: float32; its parameters need no memory yet.
        how: what to do.
    """
    exact = [module for name, module in model.named_children() if name in _FLOAT32]
    if not how.trained:
        model.requires_grad_(False)
    _cast_frozen(model, how.param_dtype, apart=exact)
    if how.trained and how.recompute:
        recompute_blocks(model, how.recompute, offload=how.offload_activations)
    if not how.shard:
        return
    reshard = how.reshard_after_forward or not how.trained
    policy = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=torch.float32)
    for module in exact:
        fully_shard(module, mesh=how.mesh, mp_policy=replace(policy, param_dtype=torch.float32))
    if how.experts is not None:
        _shard_experts(model, how.experts, policy, reshard=reshard)
    of_tower = [] if how.tower is None else transformer_blocks(how.tower)
    for module in (*transformer_blocks(model), *of_tower, *_vocabulary_layers(model)):
        fully_shard(module, mesh=how.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=how.mesh, mp_policy=policy)


def _shard_experts(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Shards divided experts over the ranks that share them, apart from the rest of their blocks."""
    # Their router gives weights in a dtype of its own choice.
    policy = replace(policy, cast_forward_inputs=False)
    *shared, _ = mesh.mesh_dim_names or ()
    for layer in expert_layers(model):
        fully_shard(layer.module, mesh=mesh[tuple(shared)], mp_policy=policy, reshard_after_forward=reshard)


def free_gathered(model: nn.Module) -> None:
    """Frees the whole parameters that blocks keep after a pass; they gather them again."""
    # Where the model is not sharded none of its blocks is.
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def recover(model: nn.Module) -> bool:
    """Prepares a model for another pass after one that broke off.

    Returns:
        False where this torch (before 2.13) cannot.
    """
    if not isinstance(model, FSDPModule):
        return True
    reset = getattr(model, "reset_iter_state", None)
    if reset is None:
        return False
    reset()
    return True


def _cast_frozen(model: nn.Module, dtype: torch.dtype, apart: list[nn.Module]) -> None:
    # Buffers (rotary frequencies) stay as they are: the sharded model does not cast them either.
    kept = {id(parameter) for module in apart for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _vocabulary_layers(model: nn.Module) -> list[nn.Module]:
    """Embeddings and output layer; tied ones are used first and last, and stay with the rest of the model."""
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    blocks = {id(module) for block in transformer_blocks(model) for module in block.modules()}
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | OutputLayer)
        and id(module) not in blocks
        and all(users[id(parameter)] == 1 for parameter in module.parameters())
    ]
