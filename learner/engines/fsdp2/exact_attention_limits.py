"""The price of attention without a variable-length kernel: tokens x tokens numbers, named before it is paid.

Packed attention then holds a mask of every segment against its context. A model that caps its scores, or is left to
transformers' eager attention, holds the scores of every head.
"""

from __future__ import annotations

import torch

from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.fsdp2.attention_calls import LONGEST_MASKED
from rollmesh.learner.engines.fsdp2.kernels.varlen import KERNEL_DTYPES
from rollmesh.mesh.errors import ConfigError

# Tokens up to which a CPU's masks are not worth a word: 64 MiB.
_QUIET = 4096
# Capped scores in bfloat16 as they are kept for the backward pass, by torch's counters.
_CAPPED_BYTES = 8.2
_SHORTEN = "shorten rollout.max_prompt_tokens + rollout.max_response_tokens"


def refuse_long_masks(
    packing: Packing, device: torch.device, dtype: torch.dtype, longest: int | None, *, capped: bool = False
) -> None:
    """Refuses masks that would be too large.

    Args:
        packing: of the model's sequences.
        device, dtype: on which and in which the model is computed.
        longest: tokens of the longest sequence; None: not known.
        capped: the model caps its scores.

    Raises:
        ConfigError: sequences can be longer than masks may be.
    """
    if packing is not Packing.ROWS and longest is not None and longest > LONGEST_MASKED:
        raise ConfigError(
            f"{_lack(device, dtype, capped)}: without one a mask of tokens x tokens is held, and sequences of up "
            f"to {longest} tokens are over its limit of {LONGEST_MASKED} (1 GiB)",
            hint=_remedy(device, dtype, capped),
        )


def describe_dense_attention(
    packing: Packing,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    longest: int | None,
    *,
    capped: bool = False,
) -> str:
    """The memory that attention takes without a kernel, in words for the log; empty: none worth a word.

    Args:
        packing: of the model's sequences.
        attention: transformers' name of the attention that rows take.
        device, dtype: on which and in which the model is computed.
        heads: of the queries.
        longest: tokens of the longest sequence; None: not known.
        capped: the model caps its scores.
    """
    if packing is Packing.ROWS:
        return _scores(heads, longest) if attention == "eager" else ""
    if device.type == "cpu" and (longest or 0) <= _QUIET:
        return ""
    held = "masks of tokens x tokens"
    if capped:
        held = "scores of heads x tokens x tokens"
        if longest is not None:
            held += f" ({heads * longest**2 * _CAPPED_BYTES / 2**30:.1f} GiB a layer)"
    return f"{_lack(device, dtype, capped)}: it holds {held}, and is slow; {_remedy(device, dtype, capped)}"


def _lack(device: torch.device, dtype: torch.dtype, capped: bool) -> str:
    scores = " with a cap on scores" if capped else ""
    return f"no kernel for packed attention{scores} in {dtype} on {device.type}"


def _remedy(device: torch.device, dtype: torch.dtype, capped: bool) -> str:
    if device.type == "cpu":
        return _SHORTEN
    if capped and dtype in KERNEL_DTYPES:
        return f"install flash-attn, or set learner.attention: flex; or {_SHORTEN}"
    if dtype in KERNEL_DTYPES:
        return f"install flash-attn, or torch 2.11 or later; or set learner.attention: flex; or {_SHORTEN}"
    return f"set learner.param_dtype: bfloat16, or learner.attention: flex; or {_SHORTEN}"


def _scores(heads: int, longest: int | None) -> str:
    gib = heads * (longest or 0) ** 2 * 4 / 2**30
    if gib < 1.0:
        return ""
    return (
        f"transformers' eager attention holds scores of heads x tokens x tokens: {gib:.1f} GiB for a sequence of "
        f"{longest} tokens; {_SHORTEN}"
    )
