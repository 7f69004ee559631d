"""The output layer of a language model together with the log-probs of its tokens, without all logits in memory.

Logits of a large vocabulary are the largest tensors of a training step: 10 GB of float32 for 16,384 tokens of 152,064.
Here they are computed tile by tile (some tokens by some of the vocabulary), reduced at once, and computed again in the
backward pass. Logits that fit into a given budget are kept instead, which saves that second product. Processes may
divide the vocabulary among them: each reduces its own columns, and a few numbers per token are exchanged.

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
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rollmesh.learner.engines.output.log_probs import mark
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.output.softmax_pieces import RowGradients, RowSums, Targets

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


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The part of the vocabulary that one process holds: neighbouring rows of the output layer's weight.

    Attributes:
        first: number of its first row in the whole vocabulary.
        real: entries of the whole vocabulary; rows from this number on only pad it, in whichever shard they are.
        group: processes that hold the vocabulary together. None: this one holds all of it.
    """

    first: int
    real: int
    group: dist.ProcessGroup | None = None

    def columns(self, rows: int, form: LogitForm) -> int:
        """The number of this shard's rows that are no padding: the first ones.

        Args:
            rows: of the shard.
            form: of the logits; it may leave out more than the shard does.
        """
        real = self.real if form.columns is None else min(self.real, form.columns)
        return min(max(real - self.first, 0), rows)


def shard_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Targets,
    shard: VocabularyShard,
    memory: LogitMemory,
    form: LogitForm,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs of the targets, and statistics of their distributions; collective in the forward pass alone.

    Padding has no probability, and its gradient is zero. The gradient of `hidden` is a part: that of this process's
    columns. The caller sums these parts over the group, by all-reduce or reduce-scatter. Gradients of weight and bias
    are whole. They are right only if the results' gradients are the same in every process of the group.

    Args:
        hidden: [R, H], the same in every process of the group.
        weight: [n, H], this process's rows; may be a view, and may consist of padding alone.
        bias: [n].
        targets: of the R rows, the same in every process; labels are numbers in the whole vocabulary.
        shard: which rows these are.
        memory: for logits of this process's columns.
        form: from products to logits.

    Returns:
        float32 [R] of each, the same in every process of the group: log-probs, entropies, sums of squares (see
        `token_log_probs`).
    """
    if not torch.is_grad_enabled():
        memory = replace(memory, kept_bytes=0)
    results: tuple[Tensor, Tensor, Tensor | None] = _OutputLogProbs.apply(
        hidden, weight, bias, targets, shard, memory, form
    )
    return results


class _Tiles:
    """The products of a micro-batch, tile by tile: each part of the vocabulary with each part of the tokens.

    Args:
        hidden: [R, H].
        weight: [n, H].
        bias: [n].
        columns: the first c of the n, without padding.
        rounded: see `LogitMemory`.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: int, *, rounded: bool) -> None:
        self._hidden, self._weight, self._bias, self._rounded = hidden, weight, bias, rounded
        self.shape = len(hidden), columns
        most_rows, most_columns = TILES[hidden.device.type]
        elements = most_rows * most_columns
        # A shard of padding alone has no columns.
        self._columns = max(1, min(columns, elements // max(1, min(most_rows, self.shape[0]))))
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
        shard: VocabularyShard,
        memory: LogitMemory,
        form: LogitForm,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tiles = _Tiles(hidden, weight, bias, shard.columns(len(weight), form), rounded=memory.rounded)
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
                sums.add(piece, rows, shard.first + columns.start, _view(second, *piece.shape))
        if shard.group is not None and shard.group.size() > 1:
            sums.combine(shard.group)
        values = sums.finish()
        saved = (hidden, weight, bias, values.normalizers, values.entropies, kept)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # None is as good as a tensor
        ctx.settings = targets, shard, memory, form  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return mark(ctx, targets, values.log_probs, values.entropies, values.squares)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, log_probs: Tensor | None, entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normalizers, entropies, kept = ctx.saved_tensors  # type: ignore[attr-defined]  # forward
        targets, shard, memory, form = ctx.settings  # type: ignore[attr-defined]
        if log_probs is None and entropy is None:
            return (None,) * 7
        tiles = _Tiles(hidden, weight, bias, shard.columns(len(weight), form), rounded=memory.rounded)
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
                first_column = shard.first + columns.start
                gradient = gradients.of(piece, rows, first_column, _view(second, *piece.shape)).mul_(slopes)
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
