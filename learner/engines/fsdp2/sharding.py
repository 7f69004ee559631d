"""Sharding and recomputation: the preparation of a model before it trains.

A single rank in float32 has nothing to shard and gets the plain model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from rollmesh.learner.engines.fsdp2.output.layer import OutputLayer

_WRAPPED = "_checkpoint_wrapped_module."
# Names of the operations that multiply matrices.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
# Children of a model that compute in float32 whatever the rest does.
_FLOAT32 = ("value_head",)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The way in which a model is to be prepared.

    Attributes:
        shard: apply FSDP2; master weights stay float32, computation is in `param_dtype`, gradients reduce in float32.
        param_dtype: compute dtype.
        mesh: to shard over, see `shard_mesh`; None: all ranks.
        trained: False: no gradients, and no master weights in addition to those in `param_dtype`.
        recompute: compute each block's activations again in the backward pass: all, or `selective`: all but the outputs
            of products and of attention.
        offload_activations: the inputs of blocks that are computed again wait in (pinned) host memory.
        reshard_after_forward: a block's parameters are gathered again for the backward pass; between the two they take
            no memory.
    """

    shard: bool
    param_dtype: torch.dtype
    mesh: DeviceMesh | None = None
    trained: bool = True
    recompute: bool | Literal["selective"] = False
    offload_activations: bool = False
    reshard_after_forward: bool = True


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
        _cast_parameters(model, how.param_dtype, apart=exact)
    elif how.recompute:
        _recompute_blocks(model, how)
    if not how.shard:
        return
    policy = MixedPrecisionPolicy(param_dtype=how.param_dtype, reduce_dtype=torch.float32)
    for module in exact:
        fully_shard(module, mesh=how.mesh, mp_policy=replace(policy, param_dtype=torch.float32))
    for module in (*transformer_blocks(model), *_vocabulary_layers(model)):
        fully_shard(module, mesh=how.mesh, mp_policy=policy, reshard_after_forward=how.reshard_after_forward)
    fully_shard(model, mesh=how.mesh, mp_policy=policy)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Computes, within the context, a sharded model in another dtype on the same parameters; plain ones stay as they
    are.

    Parameters are cast where a block gathers them, so memory holds a few blocks in that dtype and no copy of the model.

    Args:
        model: from `prepare`; not amid a pass.
        dtype: of gathered parameters, inputs and gradients.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    policies = [module._get_fsdp_state()._mp_policy for module in modules]
    _set_policies(modules, [replace(policy, param_dtype=dtype) for policy in policies])
    try:
        yield
    finally:
        _set_policies(modules, policies)


def synchronize_gradients(model: nn.Module, *, last: bool, once: bool) -> None:
    """Says how far the gradients of the next backward pass travel.

    Those of the last one are summed over all ranks, with those kept before. Until then each copy of the model adds up
    its shards, or each rank whole gradients.

    Args:
        model: from `prepare`.
        last: it is the last one.
        once: until then gradients stay whole on their rank.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not once)
        model.set_requires_all_reduce(last)


def free_gathered(model: nn.Module) -> None:
    """Frees the whole parameters that blocks keep after a pass; they gather them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def drop_whole_gradients(model: nn.Module) -> None:
    """Gives up the gradients that blocks keep whole until they are summed over the ranks."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            # FSDP2 has no public way, and `reset_iter_state` leaves them.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


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


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers: the elements of the largest module list. Those of a hybrid model are of several classes."""
    best: nn.ModuleList | None = None
    size = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            weight = sum(parameter.numel() for parameter in module.parameters())
            if weight > size:
                best, size = module, weight
    return list(best) if best is not None else []


def is_product(operation: torch._ops.OpOverload) -> bool:
    """True for products of matrices and for attention, whose outputs selective recomputation keeps."""
    name = operation.name()
    return name.rpartition("::")[2].partition(".")[0] in _PRODUCTS or "attention" in name or "attn" in name


def plain_name(name: str) -> str:
    """A parameter's name as the model has it without wrappers."""
    return name.replace(_WRAPPED, "")


def _set_policies(modules: Sequence[FSDPModule], policies: Sequence[MixedPrecisionPolicy]) -> None:
    # FSDP2 has no public way. It reads a policy at the first pass alone, and keeps what it gathers into.
    for module, policy in zip(modules, policies, strict=True):
        module.reshard()
        state = module._get_fsdp_state()
        state._mp_policy = policy
        group = state._fsdp_param_group
        if group is None:
            continue
        group.mp_policy = policy
        for parameter in group.fsdp_params:
            parameter.all_gather_outputs = []
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param
        group._init_mp_dtypes()


def _cast_parameters(model: nn.Module, dtype: torch.dtype, apart: list[nn.Module]) -> None:
    # Buffers (rotary frequencies) stay as they are: the sharded model does not cast them either.
    kept = {id(parameter) for module in apart for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
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


def _recompute_blocks(model: nn.Module, how: Preparation) -> None:
    contexts = partial(create_selective_checkpoint_contexts, _keep) if how.recompute == "selective" else noop_context_fn
    blocks = {id(block) for block in transformer_blocks(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                wrapped = checkpoint_wrapper(child, context_fn=contexts)
                parent.register_module(name, offload_wrapper(wrapped) if how.offload_activations else wrapped)


def _keep(_context: Any, operation: Any, *_args: Any, **_keywords: Any) -> CheckpointPolicy:
    """Decides by the operation: products and attention cost the time, all else the memory."""
    return CheckpointPolicy.MUST_SAVE if is_product(operation) else CheckpointPolicy.PREFER_RECOMPUTE
