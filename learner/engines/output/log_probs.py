"""Log-probs and entropy of given tokens in float32, without a float32 copy of the logits or of their softmax.

The forward pass reduces the logits rows by rows, and keeps only them, as the model gave them, and two numbers per row.
The backward pass recomputes the softmax. Log-prob, entropy and sum of squared probabilities cost one pass over the
logits together. Where the logits themselves are too large, see `layer`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.engines.output.softmax_pieces import RowGradients, RowSums, Targets

# Elements of a float32 piece. CPU: 2 MiB, which the caches of a core hold. CUDA: 64 MiB, which keeps a device busy.
_PIECE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}


def token_log_probs(logits: Tensor, targets: Targets) -> ModelOutput:
    """Log-probs of the labels, and statistics of their distributions p = softmax(logits / temperature).

    Args:
        logits: [R, V], any floating dtype; -inf forbids a token.
        targets: labels and temperatures of the R rows.

    Returns:
        `log_probs` float32 [R] (nats, with gradient), -inf for a forbidden label; `entropy` float32 [R] (nats); on
        request `sum_pi_squared` float32 [R], without gradient.
    """
    log_probs, entropy, squares = _TokenLogProbs.apply(logits, targets)
    return ModelOutput(log_probs=log_probs, entropy=entropy, sum_pi_squared=squares)


def _buffer(logits: Tensor) -> Tensor:
    """Room for the float32 rows of one piece."""
    rows, columns = logits.shape
    fitting = _PIECE_ELEMENTS[logits.device.type] // max(columns, 1)
    return torch.empty(max(1, min(fitting, rows)), columns, device=logits.device)


def _scaled(logits: Tensor, targets: Targets, rows: slice, buffer: Tensor) -> Tensor:
    """float32 [r, V] logits over temperature, written into the buffer."""
    return targets.divide(buffer[: logits[rows].shape[0]].copy_(logits[rows]), rows)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor | None]:
        sums = RowSums(targets)
        buffer, room = _buffer(logits), _buffer(logits)
        step = buffer.shape[0]
        for start in range(0, logits.shape[0], step):
            rows = slice(start, start + step)
            piece = _scaled(logits, targets, rows, buffer)
            sums.add(piece, rows, 0, room[: len(piece)])
        values = sums.finish()
        ctx.save_for_backward(logits, values.normalizers, values.entropies)
        ctx.targets = targets  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return mark(ctx, targets, values.log_probs, values.entropies, values.squares)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, log_probs: Tensor | None, entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, None]:
        logits, normalizers, entropies = ctx.saved_tensors  # type: ignore[attr-defined]  # see forward
        targets: Targets = ctx.targets  # type: ignore[attr-defined]
        if log_probs is None and entropy is None:
            return None, None
        gradients = RowGradients(targets, normalizers, entropies, log_probs, entropy)
        result = torch.empty_like(logits)
        buffer = _buffer(logits)
        room = torch.empty_like(buffer) if gradients.needs_room else buffer
        step = buffer.shape[0]
        for start in range(0, logits.shape[0], step):
            rows = slice(start, start + step)
            piece = _scaled(logits, targets, rows, buffer)
            result[rows] = gradients.of(piece, rows, 0, room[: len(piece)])
        return result, None


def mark(
    ctx: FunctionCtx, targets: Targets, log_probs: Tensor, entropies: Tensor, squares: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Marks for autograd which of the results have a gradient, and returns them."""
    ctx.set_materialize_grads(False)
    without = [] if targets.entropy_gradient else [entropies]
    ctx.mark_non_differentiable(*without, *([] if squares is None else [squares]))
    return log_probs, entropies, squares
