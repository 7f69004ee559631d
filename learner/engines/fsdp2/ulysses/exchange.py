"""The exchange between the processes that share a micro-batch (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).

Each holds a run of the tokens. For attention each gets all tokens of some heads, by one all-to-all before and one after
it. Everything else of a layer computes its own tokens. Outputs of the trained tokens are gathered, so that a loss sees
all of them in one process. Its gradient goes back to those that computed them.

Invariant: the collectives of a forward pass, and of its backward pass, are the same in all processes of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from rollmesh.learner.engines.fsdp2.attention_calls import Scoring
from rollmesh.learner.engines.fsdp2.kernels.choice import PackedLayout
from rollmesh.learner.engines.fsdp2.ulysses.row_parts import RowPart
from rollmesh.mesh.errors import DataError


class Exchange:
    """The exchange of one process with the others of its group.

    Args:
        group: processes that share micro-batches.

    Attributes:
        parts: their number.
        part: the number of this one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.parts = group.size()
        self.part = group.rank()

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """From some tokens of all heads to all tokens of some heads.

        Args:
            query: [n, H * D].
            key: [n, H_kv * D].
            value: [n, H_kv * E].
            scoring: of all heads.

        Returns:
            [N, h * D], [N, h_kv * D], [N, h_kv * E] with N = parts * n and h = H / parts; and the scoring of these.
            Where H_kv does not divide, heads of keys and values are repeated up to the next number that does.

        Raises:
            DataError: H does not divide.
        """
        if scoring.heads % self.parts:
            raise DataError(
                f"a layer's {scoring.heads} attention heads cannot be divided over {self.parts} processes",
                hint="lower learner.parallel.sp",
            )
        # As sp divides H, it also divides H / H_kv times what H_kv lacks: queries stay with their keys.
        repeats = self.parts // math.gcd(self.parts, scoring.kv_heads)
        if repeats > 1:
            key, value = (_repeated(rows, scoring.kv_heads, repeats) for rows in (key, value))
        # By destination, [n, parts, width]: one collective moves all three.
        blocks = [rows.view(len(rows), self.parts, -1) for rows in (query, key, value)]
        received = self._swap(torch.cat(blocks, -1).transpose(0, 1)).flatten(0, 1)
        q, k, v = received.split([block.shape[-1] for block in blocks], -1)
        heads, kv_heads = scoring.heads // self.parts, scoring.kv_heads * repeats // self.parts
        return q, k, v, replace(scoring, heads=heads, kv_heads=kv_heads)

    def to_tokens(self, output: Tensor) -> Tensor:
        """From all tokens of some heads, [N, h * E], to some tokens of all heads, [n, H * E]."""
        return self._swap(output.view(self.parts, -1, output.shape[-1])).transpose(0, 1).flatten(1)

    def gather_outputs(self, part: RowPart, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Values of the row's trained tokens in every process, from those of each part.

        Args:
            part: of this process.
            outputs: float32 [r] each. The gradient of one counts from all processes together.

        Returns:
            [R] each.
        """
        padded = [functional.pad(values, (0, part.most - len(values))) for values in outputs]
        gathered = _Gather.apply(self._group, *padded)
        return [values[part.places] for values in gathered]

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes in every one, [R, W], from those of each; their gradients add up.

        Args:
            rows: of this process, [r, W].
            counts: r of each process.
        """
        most, width = max(counts), rows.shape[1]
        padded = functional.pad(rows, (0, 0, 0, most - len(rows)))
        (gathered,) = _Gather.apply(self._group, padded.flatten())
        blocks = gathered.view(self.parts, most, width)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    def _swap(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _AllToAll.apply(blocks.contiguous(), self._group)
        return swapped


@dataclass(frozen=True, slots=True)
class DividedLayout:
    """The layout of a row that processes share.

    Attributes:
        whole: of all its tokens.
        exchange: with the others.
    """

    whole: PackedLayout
    exchange: Exchange


def _repeated(rows: Tensor, heads: int, repeats: int) -> Tensor:
    return rows.view(len(rows), heads, -1).repeat_interleave(repeats, 1).flatten(1)


class _AllToAll(torch.autograd.Function):
    """Block i of each process goes to process i, as its block of that origin: [parts, n, W] to the same shape."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]  # autograd contexts take any attribute
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The way back is the same exchange."""
        gradient = gradient.contiguous()
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient, group=ctx.group)  # type: ignore[attr-defined]  # see forward
        return received, None


class _Gather(torch.autograd.Function):
    """K times [m] of each process to K times [parts * m] in all: one collective, whichever of the K a loss uses."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.differentiable = ctx.needs_input_grad[1:]
        sent = torch.stack(own)
        received = sent.new_empty(group.size() * sent.shape[0], sent.shape[1])
        dist.all_gather_into_tensor(received, sent, group=group)
        by_field = received.view(group.size(), len(own), -1).transpose(0, 1)
        gathered = tuple(values.flatten() for values in by_field)
        constant = [values for values, needed in zip(gathered, ctx.differentiable, strict=True) if not needed]
        ctx.mark_non_differentiable(*constant)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each process gets the sum of all gradients of its own values."""
        parts = ctx.group.size()
        by_part = torch.stack([gradient.view(parts, -1) for gradient in gradients], 1).flatten(0, 1)
        own = by_part.new_empty(len(gradients), by_part.shape[1])
        dist.reduce_scatter_tensor(own, by_part, group=ctx.group)
        return None, *(values if needed else None for values, needed in zip(own, ctx.differentiable, strict=True))
