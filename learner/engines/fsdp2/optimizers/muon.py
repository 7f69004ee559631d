"""Muon for the matrices of the layers, AdamW for all else.

The update of a matrix is its momentum with all singular values near 1 (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/), scaled so that its root mean square is AdamW's (Liu et al. 2025,
arXiv:2502.16982, equation 4). So AdamW's learning rate and decay fit.

Where matrices are sharded, each is put together on one rank, which computes its update and gives the shards back. Ranks
take turns, so that as many matrices as there are ranks are computed at a time. Stacks of matrices (experts) are sharded
between matrices, and need no exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW

# The quintic iteration of the post above: the steepest slope at 0 that keeps values within about [0.7, 1.2].
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
# Root mean square of AdamW's updates, as found in arXiv:2502.16982.
_RMS = 0.2


class Muon(AdamW):
    """Muon for groups with `momentum`, AdamW for the others.

    Args:
        params: groups of parameters. Those with `momentum` hold matrices, [m, n] or [count, m, n], whole or sharded
            along their first dimension.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`; `lr` and `weight_decay` are Muon's too.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # gives no loss
        """Updates every parameter that has a gradient; collective over the ranks; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            if "momentum" in group:
                self._step(group)
        # AdamW passes over parameters without a gradient.
        ours = [p for group in self.param_groups if "momentum" in group for p in group["params"]]
        gradients = [p.grad for p in ours]
        for parameter in ours:
            parameter.grad = None
        super().step()
        for parameter, gradient in zip(ours, gradients, strict=True):
            parameter.grad = gradient

    def _step(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        rate = group["lr"]
        for parameter, update in zip(parameters, _orthogonal(self._updates(group, parameters)), strict=True):
            scale = _RMS * math.sqrt(max(parameter.shape[-2:]))
            parameter.mul_(1.0 - rate * group["weight_decay"])
            _local(parameter).add_(update, alpha=-rate * scale)

    def _updates(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Momenta that look ahead (Nesterov), one by one."""
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if not state:
                # AdamW expects a count of every parameter that has a state.
                state["step"] = torch.zeros(())
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["step"] += 1
            momentum = state["momentum_buffer"].lerp_(gradient, 1.0 - group["momentum"])
            yield gradient.lerp(momentum, group["momentum"])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1.

    Args:
        matrices: [..., m, n].

    Returns:
        bfloat16 of the same shape.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16().view(-1, *matrices.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def _orthogonal(updates: Iterator[Tensor]) -> Iterator[Tensor]:
    """This rank's shards of the orthogonalized updates, in their order."""
    waiting: list[DTensor] = []
    for update in updates:
        if not isinstance(update, DTensor) or len(_sharded(update)) > 1:
            # Nothing to put together: it is whole, or of experts in a group that has no other matrices.
            yield orthogonalize(_local(update))
            continue
        waiting.append(update)
        if len(waiting) == _ranks(update):
            yield from _exchange(waiting)
            waiting = []
    if waiting:
        yield from _exchange(waiting)


def _exchange(updates: Sequence[DTensor]) -> list[Tensor]:
    """Puts together the i-th matrix on rank i, computes there, and gives the shards back."""
    group = _group(updates[0])
    locals_ = [update.to_local() for update in updates]
    flat = [i for i, update in enumerate(updates) if update.dim() == 2]
    sent = [locals_[i].bfloat16().flatten() for i in flat]
    place = group.rank()
    mine = updates[flat[place]] if place < len(flat) else None
    counts = [] if mine is None else [rows * mine.shape[1] for rows in _rows(mine)]
    whole = _all_to_all(sent, counts, locals_[0], group)
    parts = [] if mine is None else orthogonalize(whole.view(mine.shape)).flatten().split(counts)
    own = [len(part) for part in sent]
    shards = iter(_all_to_all(parts, own, locals_[0], group).split(own))
    return [next(shards).view_as(part) if i in flat else orthogonalize(part) for i, part in enumerate(locals_)]


def _all_to_all(parts: Sequence[Tensor], expected: Sequence[int], like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends part i to rank i; gives the ranks' parts for this one, one after another; bfloat16."""
    sizes, wanted = (
        [*counts, *[0] * (group.size() - len(counts))] for counts in ([len(part) for part in parts], expected)
    )
    sent = torch.cat(list(parts)) if parts else like.new_empty(0, dtype=torch.bfloat16)
    received = like.new_empty(sum(wanted), dtype=torch.bfloat16)
    dist.all_to_all_single(received, sent, wanted, sizes, group=group)
    return received


def _rows(update: DTensor) -> list[int]:
    """Rows of the shard of each rank: as many as `torch.chunk` gives."""
    size, count = _ranks(update), update.shape[0]
    each = -(-count // size)
    return [max(0, min(each, count - each * rank)) for rank in range(size)]


def _group(update: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the shards."""
    (dimension,) = _sharded(update)
    return update.device_mesh.get_group(dimension)


def _sharded(update: DTensor) -> list[int]:
    """The dimensions of the mesh along which it is sharded."""
    return [i for i, placement in enumerate(update.placements) if not isinstance(placement, Replicate)]


def _ranks(update: DTensor) -> int:
    return _group(update).size()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
