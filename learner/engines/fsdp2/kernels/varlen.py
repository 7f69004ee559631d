"""Attention over packed sequences with a variable-length kernel on CUDA: FlashAttention 2 or 3, or torch's own.

All align a causal mask at the last key, so a response's queries can stand against the gathered keys of its prompt and
itself. Not exercised by the tests that run without a GPU.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments
from rollmesh.learner.engines.fsdp2.attention_calls import Scoring
from rollmesh.mesh.config.learner import AttentionName
from rollmesh.mesh.errors import DataError

FLASH_2: AttentionName = "flash_attention_2"
FLASH_3: AttentionName = "flash_attention_3"
TORCH_VARLEN: AttentionName = "torch_varlen"

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
"""Compute dtypes of the kernels."""


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Queries stay in packed order; keys are gathered per segment.

    Attributes:
        keys: int64 [M], places of the keys, segment after segment.
        cu_queries, cu_keys: int32 [S + 1], borders of the segments.
        max_queries, max_keys: longest segment and context.
        kernel: that computes it.
    """

    keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    kernel: AttentionName


def build_varlen_layout(segments: Segments, device: torch.device, kernel: AttentionName) -> VarlenLayout:
    """Index arithmetic for `varlen_attention`."""
    lengths, prefixes = segments.lengths, segments.prefix_lengths
    contexts = lengths + prefixes
    cu_keys = np.concatenate(([0], contexts.cumsum()))
    owner = np.repeat(np.arange(len(lengths)), contexts)
    offset = np.arange(cu_keys[-1]) - cu_keys[owner]
    inside = offset < prefixes[owner]
    keys = np.where(inside, segments.prefix_starts[owner] + offset, segments.starts[owner] + offset - prefixes[owner])
    return VarlenLayout(
        keys=to_device(keys, device),
        cu_queries=to_device(np.concatenate(([0], lengths.cumsum())), device, torch.int32),
        cu_keys=to_device(cu_keys, device, torch.int32),
        max_queries=int(lengths.max()),
        max_keys=int(contexts.max()),
        kernel=kernel,
    )


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scoring: Scoring) -> Tensor:
    """Causal attention within each sequence.

    Args:
        query: [N, H * D], float16 or bfloat16.
        key: [N, H_kv * D].
        value: [N, H_kv * E], E <= D: latent attention has narrower values.
        layout: from `build_varlen_layout`.
        scoring: heads, scale, window and soft cap.

    Returns:
        [N, H, E].

    Raises:
        DataError: soft-capped scores, with torch's kernel.
    """
    q = query.view(len(query), scoring.heads, -1)
    k, v = (
        functional.embedding(layout.keys, rows).view(len(layout.keys), scoring.kv_heads, -1) for rows in (key, value)
    )
    width = v.shape[-1]
    # The kernels know one width: columns of zeros give columns of zeros.
    v = functional.pad(v, (0, q.shape[-1] - width))
    borders = (layout.cu_queries, layout.cu_keys, layout.max_queries, layout.max_keys)
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    if layout.kernel != TORCH_VARLEN:
        (_, flash_varlen, *_), _ = lazy_import_flash_attention(layout.kernel)
        found = flash_varlen(
            q,
            k,
            v,
            *borders,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=window,
            softcap=scoring.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some versions give the sums of the scores as well.
        capped: Tensor = found[0] if isinstance(found, tuple) else found
        return capped[..., :width]
    if scoring.softcap is not None:
        raise DataError(
            "the model caps its attention scores, which torch's kernel cannot",
            hint="set learner.attention: flash_attention_2, flex or exact",
        )
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": scoring.heads != scoring.kv_heads} if _is_asked_to_share() else {}
    output = varlen_attn(q, k, v, *borders, scale=scoring.scale, window_size=window, **grouped)
    return cast(Tensor, output)[..., :width]


# Every layer of every micro-batch asks.
@functools.cache
def _is_asked_to_share() -> bool:
    """False before torch 2.13, where heads share keys without being asked to."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
