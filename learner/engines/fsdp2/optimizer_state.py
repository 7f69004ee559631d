"""The state of a model and its optimizer as checkpoints hold it, for torch.distributed.checkpoint.

Settings have no part in it: rates, decay and what else optimizers keep by group come from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rollmesh.learner.engines.tensors.state import MODEL_KEY, OPTIMIZER_KEY


def saved_state(named: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Any]:
    """The state as it is saved. Its tensors are those of model and optimizer: what is read into it, they have.

    Args:
        named: parameters of the model, tied ones once, and the buffers that belong to its state.
        optimizer: of the parameters.

    Returns:
        `model.NAME` and `optimizer.state.NAME.MOMENT`, nested, of tensors and DTensors.
    """
    _complete(optimizer)
    tensors = dict(named)
    moments = {name: dict(optimizer.state[tensor]) for name, tensor in tensors.items() if tensor in optimizer.state}
    return {MODEL_KEY: {name: tensor.detach() for name, tensor in tensors.items()}, OPTIMIZER_KEY: {"state": moments}}


def _complete(optimizer: Optimizer) -> None:
    """Gives moments of no step to parameters that have none: optimizers make them with a parameter's first gradient.

    A checkpoint without them could not be loaded, nor could one be loaded by a new optimizer.
    """
    optimizer.zero_grad()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fresh = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not fresh:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in fresh:
        optimizer.state[parameter]["step"].zero_()
