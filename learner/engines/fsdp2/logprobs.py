"""Log-probs and entropy of given tokens in float32, without a float32 copy of the logits or of their softmax.

Logits of a large vocabulary are the largest tensors of a training step, and reading them is the cost of a loss. The
forward pass reduces them chunk by chunk, and keeps only the logits as the model gave them and two numbers per row. The
backward pass recomputes the softmax. A chunk stays in the processor's cache while all values of its rows are computed.
So log-prob, entropy and sum of squared probabilities cost one pass over the logits together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rollmesh.learner.algorithms.types import ModelOutput

# Elements of a float32 chunk. CPU: 2 MiB, which the caches of a core hold. CUDA: 64 MiB, which keeps a device busy.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
# Bounds log-probs of tokens that a model forbids (logit -inf): exp() of it is exactly 0, and 0 times it is 0, not NaN.
_FLOOR = -1e4


def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperatures: Tensor | float = 1.0,
    *,
    entropy_gradient: bool = False,
    sum_pi_squared: bool = False,
) -> ModelOutput:
    """Log-probs of the labels, and statistics of their distributions p = softmax(logits / temperature).

    Args:
        logits: [R, V], any floating dtype; -inf forbids a token.
        labels: int64 [R].
        temperatures: float32 [R], or one for all rows.
        entropy_gradient: the entropy can be differentiated: dH/dz = -p (log p + H) for z = logits / temperature.
        sum_pi_squared: give that field too.

    Returns:
        `log_probs` float32 [R] (nats, with gradient), -inf for a forbidden label; `entropy` float32 [R] (nats); on
        request `sum_pi_squared` float32 [R], without gradient.
    """
    log_probs, entropy, squares = _TokenLogProbs.apply(logits, labels, temperatures, entropy_gradient, sum_pi_squared)
    return ModelOutput(log_probs=log_probs, entropy=entropy, sum_pi_squared=squares)


def _buffer(logits: Tensor) -> Tensor:
    """Room for the float32 rows of one chunk."""
    rows, columns = logits.shape
    fitting = _CHUNK_ELEMENTS[logits.device.type] // max(columns, 1)
    return torch.empty(max(1, min(fitting, rows)), columns, device=logits.device)


def _scaled(logits: Tensor, temperatures: Tensor | float, rows: slice, buffer: Tensor) -> Tensor:
    """float32 [r, V] logits over temperature, written into the buffer."""
    chunk = buffer[: logits[rows].shape[0]].copy_(logits[rows])
    if isinstance(temperatures, Tensor):
        return chunk.div_(temperatures[rows, None])
    return chunk if temperatures == 1.0 else chunk.div_(temperatures)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        temperatures: Tensor | float,
        entropy_gradient: bool,
        sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        count = logits.shape[0]
        log_probs, normalizers, entropies, squares = (torch.empty(count, device=logits.device) for _ in range(4))
        buffer, weights_buffer = _buffer(logits), _buffer(logits)
        step = buffer.shape[0]
        for start in range(0, count, step):
            rows = slice(start, start + step)
            chunk = _scaled(logits, temperatures, rows, buffer)
            top = chunk.amax(-1, keepdim=True)
            shifted = chunk.sub_(top)
            chosen = shifted.gather(1, labels[rows, None])[:, 0]
            weights = torch.exp(shifted.clamp_min_(_FLOOR), out=weights_buffer[: chunk.shape[0]])
            total = weights.sum(-1)
            if sum_pi_squared:
                squares[rows] = torch.linalg.vecdot(weights, weights) / total.square()
            log_total = total.log()
            log_probs[rows] = chosen - log_total
            normalizers[rows] = top[:, 0] + log_total
            entropies[rows] = log_total - weights.mul_(shifted).sum(-1) / total
        ctx.save_for_backward(logits, labels, normalizers, entropies)
        ctx.temperatures = temperatures  # type: ignore[attr-defined]  # autograd contexts take any attribute
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        if not sum_pi_squared:
            return log_probs, entropies, None
        ctx.mark_non_differentiable(*([squares] if entropy_gradient else [entropies, squares]))
        return log_probs, entropies, squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, log_probs: Tensor | None, entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        """z = logits / temperature: dz = g (onehot - p) - h p (log p + H), with g, h the two incoming gradients."""
        logits, labels, normalizers, entropies = ctx.saved_tensors  # type: ignore[attr-defined]  # see forward
        temperatures: Tensor | float = ctx.temperatures  # type: ignore[attr-defined]
        if log_probs is None and entropy is None:
            return None, None, None, None, None
        scale = (torch.zeros_like(normalizers) if log_probs is None else log_probs) / temperatures
        pull = None if entropy is None else entropy / temperatures
        result = torch.empty_like(logits)
        buffer = _buffer(logits)
        factor_buffer = None if pull is None else torch.empty_like(buffer)
        step = buffer.shape[0]
        for start in range(0, logits.shape[0], step):
            rows = slice(start, start + step)
            chunk = _scaled(logits, temperatures, rows, buffer).sub_(normalizers[rows, None])
            if pull is None or factor_buffer is None:
                gradient = chunk.exp_().mul_(-scale[rows, None])
            else:
                factor = torch.add(chunk.clamp_min_(_FLOOR), entropies[rows, None], out=factor_buffer[: len(chunk)])
                factor.mul_(-pull[rows, None]).sub_(scale[rows, None])
                gradient = chunk.exp_().mul_(factor)
            gradient.scatter_add_(1, labels[rows, None], scale[rows, None])
            result[rows] = gradient
        return result, None, None, None, None
