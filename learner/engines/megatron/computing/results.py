"""Results of a data-parallel rank's processes: each sees all of them, one calls the loss, all get its gradient.

Tensor-parallel processes compute the same results, context-parallel ones those of different tokens. The loss is called
once per data-parallel rank, as other engines call it. Its gradient goes back to every process that has computed a part.

Invariant: several results travel together, in one collective. So processes agree on the order of their collectives,
whichever of the results a loss uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def led_by(values: Sequence[Tensor], group: dist.ProcessGroup | None, leads: bool) -> list[Tensor]:
    """The values themselves; in the backward pass all processes of a group get the gradients of its leader.

    Every process must differentiate at least one of the results, else the others wait for it. Whatever gradient arises
    in a process that does not lead is ignored.

    Args:
        values: float32 [R] each; which of them can be differentiated is the same in every process.
        group: processes with equal values. None: this one is alone.
        leads: this process has the loss's gradient; exactly one does.

    Returns:
        [R] each.
    """
    if group is None or group.size() == 1:
        return list(values)
    return list(_LedBy.apply(group, leads, *values))


def gather_context(
    values: Sequence[Tensor], places: Tensor, total: int, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Values of all tokens in every process, from those of each context-parallel process; collective.

    In the backward pass a process takes the gradients of its own tokens, without a collective. They are right only if
    the results' gradients are the same in every process: see `led_by`.

    Args:
        values: float32 [r] each, of this process's tokens; r may differ between processes and may be 0.
        places: int64 [r], where these tokens stand among all R. Each token belongs to exactly one process.
        total: R.
        group: processes that divide the tokens. None: this one has all of them.

    Returns:
        [R] each.
    """
    return list(_GatherContext.apply(group, places, total, *values))


class _LedBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, leads: bool, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.leads, ctx.differentiable = group, leads, ctx.needs_input_grad[2:]
        # Copies: autograd forbids changes in place of one of several views.
        results = tuple(value.clone() for value in values)
        ctx.mark_non_differentiable(*_constant(results, ctx.differentiable))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stacked = torch.stack(gradients)
        # As many numbers as a broadcast has; the leader's place in the group need not be known.
        led = stacked if ctx.leads else torch.zeros_like(stacked)
        dist.all_reduce(led, group=ctx.group)
        return None, None, *_needed(led, ctx.differentiable)


class _GatherContext(torch.autograd.Function):
    """Each process puts its values among zeros, and all are summed.

    No lengths, padding or foreign places are needed; a result has a few bytes per token.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, places: Tensor, total: int, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.differentiable = ctx.needs_input_grad[3:]
        ctx.save_for_backward(places)
        stacked = torch.stack(values)
        gathered = stacked.new_zeros(len(values), total)
        gathered[:, places] = stacked
        if group is not None and group.size() > 1:
            dist.all_reduce(gathered, group=group)
        results = tuple(row.clone() for row in gathered)
        ctx.mark_non_differentiable(*_constant(results, ctx.differentiable))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        own = torch.stack(gradients)[:, places]
        return None, None, None, *_needed(own, ctx.differentiable)


def _constant(results: Sequence[Tensor], differentiable: Sequence[bool]) -> list[Tensor]:
    return [result for result, needed in zip(results, differentiable, strict=True) if not needed]


def _needed(gradients: Tensor, differentiable: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if needed else None for gradient, needed in zip(gradients, differentiable, strict=True)]
