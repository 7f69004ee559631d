"""Log-probs of given tokens from logits, in float32, without keeping a float32 copy of the logits.

Logits of a large vocabulary are the largest tensors of a training step. The forward pass reduces them chunk by chunk
and keeps only the logits as the model gave them and one number per row; the backward pass recomputes the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# Elements of a float32 chunk: 64 MiB.
_CHUNK_ELEMENTS = 1 << 24


def token_log_probs(logits: Tensor, labels: Tensor, temperatures: Tensor | float) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels and entropies under softmax(logits / temperature).

    Args:
        logits: [R, V], any floating dtype.
        labels: int64 [R].
        temperatures: float32 [R], or one for all rows.

    Returns:
        log-probs float32 [R] (nats, with gradient); entropies float32 [R] (nats, without).
    """
    log_probs, entropies = _TokenLogProbs.apply(logits, labels, temperatures)
    return log_probs, entropies


def _rows_per_chunk(logits: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))


def _scaled(logits: Tensor, temperatures: Tensor | float, rows: slice) -> Tensor:
    """float32 [r, V] logits over temperature."""
    chunk = logits[rows].float()
    if isinstance(temperatures, Tensor):
        return chunk / temperatures[rows, None]
    return chunk if temperatures == 1.0 else chunk / temperatures


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, labels: Tensor, temperatures: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        count, step = logits.shape[0], _rows_per_chunk(logits)
        log_probs, normalizers, entropies = (torch.empty(count, device=logits.device) for _ in range(3))
        for start in range(0, count, step):
            rows = slice(start, start + step)
            scaled = _scaled(logits, temperatures, rows)
            normalizer = torch.logsumexp(scaled, -1)
            normalizers[rows] = normalizer
            log_probs[rows] = scaled.gather(1, labels[rows, None])[:, 0] - normalizer
            probabilities = torch.exp(scaled - normalizer[:, None])
            # 0 * -inf where a model forbids tokens: such terms count 0.
            entropies[rows] = normalizer - (probabilities * scaled).nan_to_num_(nan=0.0).sum(-1)
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.temperatures = temperatures  # type: ignore[attr-defined]  # autograd contexts take any attribute
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, normalizers = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward
        temperatures: Tensor | float = ctx.temperatures  # type: ignore[attr-defined]
        scale = gradient / temperatures
        result = torch.empty_like(logits)
        for start in range(0, logits.shape[0], _rows_per_chunk(logits)):
            rows = slice(start, start + _rows_per_chunk(logits))
            chunk = _scaled(logits, temperatures, rows).sub_(normalizers[rows, None]).exp_().mul_(-scale[rows, None])
            chunk.scatter_add_(1, labels[rows, None], scale[rows, None])
            result[rows] = chunk.to(result.dtype)
        return result, None, None
