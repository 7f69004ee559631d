"""AdamW whose moments rest in bfloat16: half their memory.

A step computes in float32. Moments are rounded stochastically when they are stored: to the nearest number, a second
moment that changes by a thousandth per step would never change. Expectations are then those of float32.

Invariant: the random numbers of a step follow from its number, and the parameter's and the shard's places. So copies of
a shard stay the same, and a resumed run continues bit by bit on as many shards. Torch's generators are not drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

# Elements that are computed at a time: float32 copies of this many are all that a step needs besides.
_PIECE = 1 << 22
# bfloat16 is the upper half of float32.
_LOWER_HALF = 0xFFFF


class RoundedAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with moments in bfloat16.

    Args:
        params: groups of float32 parameters, sharded or not.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # gives no loss
        """Updates every parameter that has a gradient; closures are not supported."""
        assert closure is None
        places = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for place, (group, parameter) in enumerate(places):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["step"] += 1
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            local = [_local(tensor).view(-1) for tensor in tensors]
            generator = torch.Generator(local[0].device)
            generator.manual_seed(hash((int(state["step"]), place, _shard_of(parameter))))
            for pieces in zip(*(tensor.split(_PIECE) for tensor in local), strict=True):
                _update(group, int(state["step"]), generator, *pieces)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """bfloat16 of float32: one of the two neighbours, so that the expectation is the value.

    Args:
        values: float32, finite; overwritten.
        generator: of the values' device.
    """
    noise = torch.randint(
        0, _LOWER_HALF + 1, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = values.view(torch.int32).add_(noise).bitwise_and_(~_LOWER_HALF)
    return bits.view(torch.float32).to(torch.bfloat16)


def _update(
    group: dict[str, Any],
    step: int,
    generator: torch.Generator,
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
) -> None:
    (beta1, beta2), rate = group["betas"], group["lr"]
    mean = first.float().lerp_(gradient, 1.0 - beta1)
    square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    divisor = (square / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1.0 - rate * group["weight_decay"]).addcdiv_(mean, divisor, value=-rate / (1.0 - beta1**step))
    first.copy_(round_stochastically(mean, generator))
    second.copy_(round_stochastically(square, generator))


def _shard_of(tensor: Tensor) -> int:
    """The number of this rank's shard."""
    if not isinstance(tensor, DTensor):
        return 0
    (dimension,) = (i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    return tensor.device_mesh.get_local_rank(dimension)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
