"""Gradients of a sharded model on their way: when they are summed over the ranks, and when they are given up."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


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


def drop_whole_gradients(model: nn.Module) -> None:
    """Gives up the gradients that blocks keep whole until they are summed over the ranks."""
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            # FSDP2 has no public way, and `reset_iter_state` leaves them.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
