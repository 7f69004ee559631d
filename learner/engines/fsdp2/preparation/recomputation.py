"""Recomputation: blocks that keep their input, or little more, and compute the rest again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks

_WRAPPED = "_checkpoint_wrapped_module."
# A layer with an adapter holds the one without as a part.
_ADAPTED = "base_layer."
# Names of the operations that multiply matrices.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})


def recompute_blocks(model: nn.Module, how: Literal[True, "selective"], *, offload: bool) -> None:
    """Wraps every block, in place.

    Args:
        model: before it is sharded.
        how: True: all is computed again; `selective`: all but the outputs of products and of attention.
        offload: the inputs of blocks wait in (pinned) host memory.
    """
    contexts = partial(create_selective_checkpoint_contexts, _keep) if how == "selective" else noop_context_fn
    blocks = {id(block) for block in transformer_blocks(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in blocks:
                wrapped = checkpoint_wrapper(child, context_fn=contexts)
                parent.register_module(name, offload_wrapper(wrapped) if offload else wrapped)


def is_product(operation: torch._ops.OpOverload) -> bool:
    """True for products of matrices and for attention, whose outputs selective recomputation keeps."""
    name = operation.name()
    return name.rpartition("::")[2].partition(".")[0] in _PRODUCTS or "attention" in name or "attn" in name


def plain_name(name: str) -> str:
    """A parameter's name as the model has it without wrappers and adapters."""
    return name.replace(_WRAPPED, "").replace(_ADAPTED, "")


def _keep(_context: Any, operation: Any, *_args: Any, **_keywords: Any) -> CheckpointPolicy:
    """Decides by the operation: products and attention cost the time, all else the memory."""
    return CheckpointPolicy.MUST_SAVE if is_product(operation) else CheckpointPolicy.PREFER_RECOMPUTE
