"""The exchange between ranks that have different experts of a layer (GShard, arXiv 2006.16668).

Each rank sends every token to the ranks of its experts, once for each of them. They compute, and send the results back.
The weights of a token's experts multiply its results where the token is.

Invariants: no token is dropped. The collectives of a forward pass, and of its backward pass, are the same in all ranks
of the group. This also holds for a rank whose experts get no token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollmesh.learner.engines.experts.balance import loads_of

Compute = Callable[[Tensor, Tensor], Tensor]
"""From rows [R, H] and the number of the expert of each, among this rank's, int64 [R], to the results [R, H]."""


class ExpertExchange:
    """The exchange of one rank with the others of its group.

    Args:
        group: ranks that together have all experts, in the order of the experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.parts = group.size()

    def computed(self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int, compute: Compute) -> Tensor:
        """The weighted sum of what each token's experts give; collective.

        Args:
            hidden: [T, H].
            chosen: int64 [T, K], of all experts.
            weights: [T, K].
            experts: how many each rank has.
            compute: by this rank's experts.

        Returns:
            [T, H], in the dtype of `hidden`.
        """
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = loads_of(flat, self.parts * experts).long().view(self.parts, experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        # One wait for the device: the collectives that follow need numbers.
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        own = torch.arange(experts, device=hidden.device).repeat(self.parts)
        numbers = own.repeat_interleave(arriving.view(-1), output_size=sum(received))
        rows = _exchanged(hidden[order // chosen.shape[-1]], sent, received, self._group)
        results = _exchanged(_with_filler(rows, numbers, compute), received, sent, self._group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_token = results[back].view(*chosen.shape, hidden.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _with_filler(rows: Tensor, numbers: Tensor, compute: Compute) -> Tensor:
    """Results of experts that always compute something: all ranks then have gradients to exchange."""
    filled = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return compute(filled, torch.cat([numbers, numbers.new_zeros(1)]))[:-1]


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(rows, sent, received, group)
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Rows of each rank go to the others, in the order of the ranks; [sum(sent), H] to [sum(received), H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The way back is the same exchange."""
        returned = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return returned, None, None, None
