"""Softmax of wide rows in float32, piece by piece: the arithmetic of log-probs, entropies and their gradients.

A piece is some rows and some neighbouring columns of the scaled logits z. A row's columns may come in several pieces.
Sums are kept relative to the largest z so far, and shrink when a larger one comes: online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867). A piece stays in the processor's cache while all values of its rows are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Bounds log-probs of tokens that a model forbids (logit -inf): exp() of it is exactly 0, and 0 times it is 0, not NaN.
_FLOOR = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The values that are wanted of R rows of logits.

    Attributes:
        labels: int64 [R], ids of the tokens.
        temperatures: float32 [R], or one for all rows.
        entropy_gradient: the entropy can be differentiated.
        sum_pi_squared: the sums of squared probabilities are wanted too.
    """

    labels: Tensor
    temperatures: Tensor | float = 1.0
    entropy_gradient: bool = False
    sum_pi_squared: bool = False

    def divide(self, piece: Tensor, rows: slice) -> Tensor:
        """Divides logits [r, c] of these rows by their temperatures, in place."""
        if isinstance(self.temperatures, Tensor):
            return piece.div_(self.temperatures[rows, None])
        return piece if self.temperatures == 1.0 else piece.div_(self.temperatures)


class RowSums:
    """Sums over the columns seen so far, of R rows.

    Args:
        targets: what is wanted.
    """

    def __init__(self, targets: Targets) -> None:
        labels = targets.labels
        self._labels = labels
        # Not -inf: the difference of two would be NaN.
        self._top = torch.full(labels.shape, torch.finfo(torch.float32).min, device=labels.device)
        self._chosen = torch.full_like(self._top, -torch.inf)
        self._total = torch.zeros_like(self._top)
        self._weighted = torch.zeros_like(self._top)
        self._squares = torch.zeros_like(self._top) if targets.sum_pi_squared else None

    def add(self, piece: Tensor, rows: slice, first: int, room: Tensor) -> None:
        """Adds columns of some rows.

        Args:
            piece: float32 [r, c], z; overwritten.
            rows: which r of the R.
            first: the first column's number.
            room: float32 [r, c], overwritten.
        """
        here, inside = _labels_in(piece, self._labels[rows], first)
        self._chosen[rows] = torch.where(inside, piece.gather(1, here[:, None])[:, 0], self._chosen[rows])
        self._raise_top(rows, torch.maximum(self._top[rows], piece.amax(-1)))
        shifted = piece.sub_(self._top[rows, None]).clamp_min_(_FLOOR)
        weights = torch.exp(shifted, out=room)
        if self._squares is not None:
            self._squares[rows] += torch.linalg.vecdot(weights, weights)
        self._total[rows] += weights.sum(-1)
        self._weighted[rows] += weights.mul_(shifted).sum(-1)

    def combine(self, group: dist.ProcessGroup) -> None:
        """Adds the columns that the other processes of a group have seen; collective.

        Afterwards the sums are the same in all of them.

        Args:
            group: each process has added other columns of the same rows, maybe none.
        """
        # A label is among the columns of one process; in the others its logit is still -inf.
        largest = torch.stack([self._top, self._chosen])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        top, self._chosen = largest.unbind()
        self._raise_top(slice(None), top)
        squares = [] if self._squares is None else [self._squares]
        sums = torch.stack([self._total, self._weighted, *squares])
        dist.all_reduce(sums, group=group)
        self._total, self._weighted, *squares = sums.unbind()
        self._squares = squares[0] if squares else None

    def finish(self) -> RowValues:
        """The values, when every column has been added, and those of other processes combined."""
        log_total = self._total.log()
        return RowValues(
            log_probs=self._chosen - self._top - log_total,
            entropies=log_total - self._weighted / self._total,
            squares=None if self._squares is None else self._squares / self._total.square(),
            normalizers=self._top + log_total,
        )

    def _raise_top(self, rows: slice, top: Tensor) -> None:
        """Makes the sums of these rows relative to a larger z, float32 [r]."""
        lower = (self._top[rows] - top).clamp_min_(_FLOOR)
        shrink = lower.exp()
        self._top[rows] = top
        if self._squares is not None:
            self._squares[rows] *= shrink * shrink
        self._weighted[rows] = (self._weighted[rows] + lower * self._total[rows]) * shrink
        self._total[rows] *= shrink


@dataclass(frozen=True, slots=True, eq=False)
class RowValues:
    """Values of R distributions; float32 [R].

    Attributes:
        log_probs: of the labels, nats; -inf for one that is forbidden.
        entropies: nats.
        squares: sums of squared probabilities, where they are wanted.
        normalizers: log-sum-exp of z.
    """

    log_probs: Tensor
    entropies: Tensor
    squares: Tensor | None
    normalizers: Tensor


class RowGradients:
    """Gradients of log-probs and entropies by logits: dl = (g (onehot - p) - h p (log p + H)) / temperature.

    Args:
        targets: as in the forward pass.
        normalizers, entropies: float32 [R], from it.
        log_probs, entropy: g and h, the incoming gradients, float32 [R]; none: zero.
    """

    def __init__(
        self, targets: Targets, normalizers: Tensor, entropies: Tensor, log_probs: Tensor | None, entropy: Tensor | None
    ) -> None:
        self._labels = targets.labels
        self._normalizers, self._entropies = normalizers, entropies
        self._scale = (torch.zeros_like(normalizers) if log_probs is None else log_probs) / targets.temperatures
        self._pull = None if entropy is None else entropy / targets.temperatures

    @property
    def needs_room(self) -> bool:
        """True where `of` needs room for a second piece."""
        return self._pull is not None

    def of(self, piece: Tensor, rows: slice, first: int, room: Tensor) -> Tensor:
        """The gradient of a piece, in its place.

        Args:
            piece: float32 [r, c], z; overwritten with the gradient.
            rows: which r of the R.
            first: the first column's number.
            room: float32 [r, c], overwritten where `needs_room`.
        """
        scale = self._scale[rows]
        log_p = piece.sub_(self._normalizers[rows, None])
        if self._pull is None:
            gradient = log_p.exp_().mul_(-scale[:, None])
        else:
            factor = torch.add(log_p.clamp_min_(_FLOOR), self._entropies[rows, None], out=room)
            factor.mul_(-self._pull[rows, None]).sub_(scale[:, None])
            gradient = log_p.exp_().mul_(factor)
        here, inside = _labels_in(piece, self._labels[rows], first)
        return gradient.scatter_add_(1, here[:, None], torch.where(inside, scale, 0.0)[:, None])


def _labels_in(piece: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The labels' places in the piece, any for those outside; and which are inside."""
    places = labels - first
    here = places.clamp(0, piece.shape[1] - 1)
    return here, places == here
