"""The output layer of a language model together with the log-probs of its tokens, without all logits in memory.

Logits of a large vocabulary are the largest tensors of a training step: 10 GB of float32 for 16,384 tokens of 152,064.
Here they are computed tile by tile (some tokens by some of the vocabulary), reduced at once, and computed again in the
backward pass. Logits that fit into a given budget are kept instead, which saves that second product.

Invariants: logits are float32, whichever way and whatever the micro-batch's size, so that log-probs of the same weights
agree between micro-batches. Gradients are summed in float32, and rounded once to the dtype of the weights.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) and Liger's kernels give neither entropies nor squares;
docs/training-engines.md says more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.output.log_probs import mark
from rollmesh.learner.engines.fsdp2.output.logit_form import LogitForm
from rollmesh.learner.engines.fsdp2.output.softmax_pieces import RowGradients, RowSums, Targets

TILES = {"cpu": (512, 1024), "cuda": (8192, 8192)}
"""Tokens and columns of a tile. CPU: 2 MiB, which the caches of a core hold. CUDA: 256 MiB, enough for a product."""


@dataclass(frozen=True, slots=True)
class LogitMemory:
    """The memory for logits.

    Attributes:
        kept_bytes: float32 logits of a micro-batch up to this size stay until the backward pass.
        rounded: logits are rounded to the compute dtype, as transformers does it.
    """

    kept_bytes: int
    rounded: bool = False


class OutputLayer(nn.Module):
    """A linear layer over the vocabulary that can give log-probs in place of logits.

    Args:
        layer: gives its parameters, which keep their names.
        form: from its products to logits.
        memory: how much may be kept.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, form: LogitForm, memory: LogitMemory) -> None:
        super().__init__()
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self._form, self._memory = form, memory

    def forward(
        self, hidden: Tensor, targets: Opaque[Targets] | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
        """Products, or with targets the log-probs of their tokens.

        Args:
            hidden: [..., H]; with targets [R, H].
            targets: of the R rows.

        Returns:
            [..., V]; with targets float32 [R] of each: log-probs, entropies, sums of squares (see `token_log_probs`).
        """
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        memory = self._memory if torch.is_grad_enabled() else replace(self._memory, kept_bytes=0)
        results: tuple[Tensor, Tensor, Tensor | None] = _OutputLogProbs.apply(
            hidden, self.weight, self.bias, targets.value, self._form, memory
        )
        return results


class _Tiles:
    """The products of a micro-batch, tile by tile: each part of the vocabulary with each part of the tokens."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm, *, rounded: bool) -> None:
        self._hidden, self._weight, self._bias, self._rounded = hidden, weight, bias, rounded
        rows, columns = TILES[hidden.device.type]
        self.shape = len(hidden), form.columns or len(weight)
        elements = rows * columns
        self._columns = min(self.shape[1], elements // max(1, min(rows, self.shape[0])))
        # A small vocabulary leaves room for more tokens.
        self._rows = max(1, min(self.shape[0], elements // self._columns))

    def room(self) -> Tensor:
        """Room for a tile, float32."""
        return torch.empty(self._rows * self._columns, device=self._hidden.device)

    def vocabulary(self) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the vocabulary with their weights [c, H], in the dtype in which they are multiplied."""
        for columns in _parts(self.shape[1], self._columns):
            weight = self._weight[columns]
            yield columns, weight if weight.is_cuda else weight.float()

    def tokens(self) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the tokens with their hidden states [r, H]."""
        for rows in _parts(self.shape[0], self._rows):
            yield rows, self._hidden[rows]

    def products(self, hidden: Tensor, weight: Tensor, columns: slice, room: Tensor) -> Tensor:
        """float32 [r, c] in the room, of hidden states [r, H] and the weights of these columns."""
        products = _view(room, len(hidden), len(weight))
        _multiply(hidden, weight.T, products)
        if self._bias is not None:
            products += self._bias[columns]
        return products.copy_(products.to(self._hidden.dtype)) if self._rounded else products


class _OutputLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        form: LogitForm,
        memory: LogitMemory,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tiles = _Tiles(hidden, weight, bias, form, rounded=memory.rounded)
        fits = math.prod(tiles.shape) * 4 <= memory.kept_bytes
        kept = torch.empty(tiles.shape, device=hidden.device) if fits else None
        sums = RowSums(targets)
        first, second = tiles.room(), tiles.room()
        for columns, part in tiles.vocabulary():
            for rows, states in tiles.tokens():
                products = tiles.products(states, part, columns, first)
                if kept is not None:
                    kept[rows, columns] = products
                piece = targets.divide(form.apply(products), rows)
                sums.add(piece, rows, columns.start, _view(second, *piece.shape))
        values = sums.finish()
        saved = (hidden, weight, bias, values.normalizers, values.entropies, kept)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # None is as good as a tensor
        ctx.settings = targets, form, memory  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return mark(ctx, targets, values.log_probs, values.entropies, values.squares)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, log_probs: Tensor | None, entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normalizers, entropies, kept = ctx.saved_tensors  # type: ignore[attr-defined]  # forward
        targets, form, memory = ctx.settings  # type: ignore[attr-defined]
        if log_probs is None and entropy is None:
            return (None,) * 6
        tiles = _Tiles(hidden, weight, bias, form, rounded=memory.rounded)
        gradients = RowGradients(targets, normalizers, entropies, log_probs, entropy)
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        of_hidden = torch.zeros(hidden.shape, device=hidden.device) if needs[0] else None
        # Columns that only pad the vocabulary have no gradient.
        of_weight = torch.zeros_like(weight) if needs[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        first, second = tiles.room(), tiles.room()
        for columns, part in tiles.vocabulary():
            of_part = None if of_weight is None else _room_for_sums(of_weight[columns])
            for rows, states in tiles.tokens():
                if kept is None:
                    products = tiles.products(states, part, columns, first)
                else:
                    products = _view(first, len(states), len(part)).copy_(kept[rows, columns])
                logits = form.apply(products)
                slopes = form.slopes(logits)
                piece = targets.divide(logits, rows)
                gradient = gradients.of(piece, rows, columns.start, _view(second, *piece.shape)).mul_(slopes)
                if of_hidden is not None:
                    _multiply(gradient, part, of_hidden[rows], add=True)
                if of_part is not None:
                    _multiply(gradient.T, states, of_part, add=True)
                if of_bias is not None:
                    of_bias[columns] += gradient.sum(0)
            if of_weight is not None and of_part is not None and of_part.dtype != of_weight.dtype:
                of_weight[columns] = of_part
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            of_weight,
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = a b, or out += a b, in float32; on CUDA the factors of bfloat16 models are bfloat16, for tensor cores."""
    if a.is_cuda and torch.bfloat16 in (a.dtype, b.dtype):
        product = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        out.add_(product) if add else out.copy_(product)
    else:
        torch.addmm(out, a.float(), b.float(), beta=1.0 if add else 0.0, out=out)


def _room_for_sums(zeros: Tensor) -> Tensor:
    """Zeros in float32: the given ones where they are."""
    return zeros if zeros.dtype == torch.float32 else torch.zeros(zeros.shape, device=zeros.device)


def _view(room: Tensor, rows: int, columns: int) -> Tensor:
    return room[: rows * columns].view(rows, columns)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
