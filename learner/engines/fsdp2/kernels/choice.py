"""The choice of a kernel for packed attention: by name, or the best that is there."""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from rollmesh.learner.batching.types import Segments
from rollmesh.learner.engines.fsdp2.attention_calls import ExactLayout, build_layout
from rollmesh.learner.engines.fsdp2.kernels.flex import FlexLayout, build_flex_layout
from rollmesh.learner.engines.fsdp2.kernels.varlen import (
    FLASH_2,
    FLASH_3,
    KERNEL_DTYPES,
    TORCH_VARLEN,
    VarlenLayout,
    build_varlen_layout,
)
from rollmesh.mesh.config.learner import AttentionName
from rollmesh.mesh.errors import ConfigError

PackedLayout = ExactLayout | FlexLayout | VarlenLayout

EXACT: AttentionName = "exact"
FLEX: AttentionName = "flex"
KEY = "learner.attention"

# From the fastest. Flex is compiled again for every model, so it is taken by name alone.
_ORDER: tuple[AttentionName, ...] = (FLASH_3, FLASH_2, TORCH_VARLEN, EXACT)
# Compute capabilities (major): the first devices that FlashAttention 2 serves, and those for which version 3 is built
# (https://github.com/Dao-AILab/flash-attention: H100 and H800). It has no code for later ones, and loads there all the
# same.
_AMPERE, _HOPPER = 8, 9


def choose_kernel(
    name: AttentionName, device: torch.device, dtype: torch.dtype, *, capped: bool = False
) -> AttentionName:
    """The kernel to use.

    Args:
        name: as configured.
        device, dtype: on which and in which the model is computed.
        capped: the model caps its scores.

    Raises:
        ConfigError: the one that was named cannot run here; says what it lacks.
    """
    if name == "auto":
        return next(kernel for kernel in _ORDER if not _lacks(kernel, device, dtype, capped))
    if lacks := _lacks(name, device, dtype, capped):
        taken = choose_kernel("auto", device, dtype, capped=capped)
        raise ConfigError(f"{KEY}: {name} needs {lacks}", hint=f"set {KEY}: auto, which takes {taken} here")
    return name


def build_layout_for(kernel: AttentionName, segments: Segments, device: torch.device) -> PackedLayout:
    """The layout of a packed micro-batch, as its kernel takes it.

    Args:
        kernel: from `choose_kernel`.
        segments: of the micro-batch.
        device: where the indices go.
    """
    if kernel == EXACT:
        return build_layout(segments, device)
    if kernel == FLEX:
        return build_flex_layout(segments, device)
    return build_varlen_layout(segments, device, kernel)


def _lacks(kernel: AttentionName, device: torch.device, dtype: torch.dtype, capped: bool) -> str:
    """The first thing that is missing, in words; empty: nothing is."""
    if kernel == EXACT:
        return ""
    if device.type != "cuda":
        return f"a CUDA device, and this one is {device.type}"
    if kernel == FLEX:
        return "" if importlib.util.find_spec("triton") is not None else "the package triton"
    if dtype not in KERNEL_DTYPES:
        return f"learner.param_dtype: bfloat16, and this is {str(dtype).removeprefix('torch.')}"
    if kernel == TORCH_VARLEN:
        if not _has_torch_varlen():
            return "torch 2.11 or later"
        return "scores without a cap, and this model's have one" if capped else ""
    if kernel == FLASH_2 and not is_flash_attn_2_available():
        return "the package flash-attn, 2.3.3 or later"
    if kernel == FLASH_3 and not is_flash_attn_3_available():
        return "the package flash-attn-3"
    capability = torch.cuda.get_device_capability(device)[0]
    if kernel == FLASH_3:
        return "" if capability == _HOPPER else f"a device of compute capability {_HOPPER}.x (Hopper)"
    return "" if capability >= _AMPERE else f"a device of compute capability {_AMPERE}.0 or later"


@cache
def _has_torch_varlen() -> bool:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
