"""Sharding and recomputation: what is done to a model before it trains.

A single rank in float32 has nothing to shard and gets the plain model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from learner.engines.fsdp2.loading import transformer_blocks

_WRAPPED = "_checkpoint_wrapped_module."


def prepare(model: nn.Module, *, shard: bool, param_dtype: torch.dtype, recompute: bool) -> None:
    """Shards every transformer block and then the rest, in place.

    Args:
        model: on its device, float32.
        shard: apply FSDP2; master weights stay float32, computation is in `param_dtype`, gradients reduce in float32.
        param_dtype: compute dtype.
        recompute: recompute each block's activations in the backward pass.
    """
    if recompute:
        _recompute_blocks(model)
    if not shard:
        return
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in transformer_blocks(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def plain_name(name: str) -> str:
    """A parameter's name as the model has it without wrappers."""
    return name.replace(_WRAPPED, "")


def _recompute_blocks(model: nn.Module) -> None:
    blocks = {id(block) for block in transformer_blocks(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                parent.register_module(name, checkpoint_wrapper(child))
