"""Attention over packed sequences, registered with transformers under `ATTENTION`.

The model calls it like any of its attention functions. The keyword `layout`, which the model's forward hands through to
every layer, says which tokens belong together, and which kernel computes them. On the CPU, and on CUDA without a kernel
(`kernels`), it computes padded calls over gathered segments (`attention_calls`), exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from rollmesh.learner.engines.fsdp2.attention_calls import AttentionCall, Scoring, refuse_mask
from rollmesh.learner.engines.fsdp2.kernels.choice import PackedLayout
from rollmesh.learner.engines.fsdp2.kernels.flex import FlexLayout, flex_packed
from rollmesh.learner.engines.fsdp2.kernels.varlen import VarlenLayout, varlen_attention
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.ulysses.exchange import DividedLayout
from rollmesh.mesh.errors import DataError

ATTENTION = "rollmesh_packed"


@torch.compiler.disable(reason="the layout of a batch decides the calls")
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - part of the interface
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: Opaque[PackedLayout | DividedLayout] | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row.

    Args:
        module: the attention layer.
        query: [1, H, N, D].
        key, value: [1, H_kv, N, D], H a multiple of H_kv.
        attention_mask: must be None; the layout defines which tokens see one another.
        scaling: factor of the scores; none: 1 / sqrt(D).
        dropout: ignored: the current policy must be the one with the compared log-probs.
        sliding_window: keys a query sees, itself included; none: all.
        softcap: scores become softcap * tanh(scores / softcap).
        layout: from `kernels.choice.build_layout_for`; or divided: N are this process's tokens.
        s_aux: attention sinks, not supported.

    Returns:
        [1, N, H, D], and None for the weights.

    Raises:
        DataError: the model asks for a feature that cannot be computed exactly here.
    """
    if layout is None or attention_mask is not None or s_aux is not None:
        raise DataError(
            f"{type(module).__name__} cannot run packed: "
            + ("it keeps the layout from its layers" if layout is None else "it needs a mask or sinks of its own"),
            hint="choose a model whose attention layers pass on what their caller gives them",
        )
    scoring = Scoring(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    # Token-major rows, so that a gather moves whole tokens; squeezed, as the gradient of an index is zero-filled first.
    q, k, v = (tensor.squeeze(0).transpose(0, 1).flatten(1) for tensor in (query, key, value))
    match layout.value:
        case DividedLayout(whole, exchange):
            output = exchange.to_tokens(_compute(*exchange.to_heads(q, k, v, scoring), whole))
        case whole:
            output = _compute(q, k, v, scoring, whole)
    return output.view(len(output), scoring.heads, -1)[None], None


def _compute(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, layout: PackedLayout) -> Tensor:
    """Attention of a whole row, [N, H * E]."""
    if isinstance(layout, VarlenLayout):
        return varlen_attention(query, key, value, layout, scoring).flatten(1)
    if isinstance(layout, FlexLayout):
        return flex_packed(query, key, value, layout, scoring)
    outputs = [_attend(query, key, value, call, scoring) for call in layout.calls]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if layout.restore is None else _gather(layout.restore, output)


def _attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scoring: Scoring) -> Tensor:
    """One padded call, [B * Q, H * D]."""
    count, rows, columns = call.shape
    q = _gather(call.queries, query).view(count, rows, scoring.heads, -1).transpose(1, 2)
    k = _gather(call.keys, key).view(count, columns, scoring.kv_heads, -1).transpose(1, 2)
    v = _gather(call.keys, value).view(count, columns, scoring.kv_heads, -1).transpose(1, 2)
    mask = call.mask(scoring.window, q.dtype)
    if scoring.softcap is not None:
        output = _softcapped(q, k, v, mask, scoring.scale, scoring.softcap)
    else:
        grouped = scoring.heads != scoring.kv_heads
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=grouped
        )
    return output.transpose(1, 2).reshape(count * rows, -1)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.tanh((q @ k.mT) * (scale / softcap)) * softcap
    if mask is None:
        refuse_mask(scores.shape[-2] * scores.shape[-1])
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    return torch.softmax((scores + mask).float(), -1).to(v.dtype) @ v


def _gather(index: Tensor, rows: Tensor) -> Tensor:
    # An embedding look-up is a gather; its backward adds whole rows, many times faster than index_add on CPU.
    return functional.embedding(index, rows)


AttentionInterface.register(ATTENTION, packed_attention)
