"""The compute dtype of a sharded model, changed for a time on the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


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
