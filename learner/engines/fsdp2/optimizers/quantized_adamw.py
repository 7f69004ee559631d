"""AdamW with moments in 8 bits: a quarter of their memory (Dettmers et al. 2022, arXiv:2110.02861).

Each row of a matrix is divided into blocks of 256 columns. A block has a float32 scale, its largest number, and a code
of 8 bits per element. Codes are places in a table of 256 numbers between -1 and 1, denser towards 0 (section 2.2). The
root of the second moment is stored, so that it has the range of the first one. A number that is not 0 is not stored as
0 there, for steps divide by it. Vectors stay in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rollmesh.learner.engines.fsdp2.optimizers.compact_adamw import CompactAdamW

_BLOCK = 256
_DECADES = 7
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"


class QuantizedAdamW(CompactAdamW):
    """AdamW with the moments of matrices in 8 bits."""

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter.dim() < 2:
            return {name: torch.zeros_like(parameter) for name in _MOMENTS}
        codes = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in _MOMENTS}
        return codes | {name + _SCALE: _scales(parameter) for name in _MOMENTS}

    def _read(self, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if len(kept) == len(_MOMENTS):
            return kept["exp_avg"].clone(), kept["exp_avg_sq"].clone()
        first, root = (
            dequantize(kept[name], kept[name + _SCALE], signed=signed)
            for name, signed in zip(_MOMENTS, (True, False), strict=True)
        )
        return first, root.square_()

    def _write(self, kept: dict[str, Tensor], first: Tensor, second: Tensor, generator: torch.Generator) -> None:
        moments = (first, second)
        if len(kept) == len(_MOMENTS):
            for name, values in zip(_MOMENTS, moments, strict=True):
                kept[name].copy_(values)
            return
        for name, values, signed in zip(_MOMENTS, (first, second.sqrt_()), (True, False), strict=True):
            codes, scales = quantize(values, generator, signed=signed)
            kept[name].copy_(codes)
            kept[name + _SCALE].copy_(scales)


def quantize(values: Tensor, generator: torch.Generator, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales; each code is that of one of the two neighbours, so that the expectation is the value.

    Args:
        values: float32 [rows, width].
        generator: of the values' device.
        signed: they may be negative; else a positive one stays positive.

    Returns:
        uint8 [rows, width], float32 [rows, blocks].
    """
    width = values.shape[1]
    blocks = _blocks(values)
    scales = blocks.abs().amax(-1)
    parts = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    table = _table(signed, values.device)
    above = torch.searchsorted(table, parts, right=True, out_int32=True).clamp_(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    share = (parts - low) / (high - low)
    codes = above - 1 + (torch.rand(share.shape, device=share.device, generator=generator) < share)
    if not signed:
        codes = codes.clamp_min_(1).where(blocks > 0, 0)
    return codes.to(torch.uint8).flatten(1)[:, :width], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values, float32 [rows, width], of a result of `quantize`."""
    rows, width = codes.shape
    parts = _table(signed, codes.device).index_select(0, codes.flatten().int()).view(rows, width)
    return (_blocks(parts) * scales[..., None]).flatten(1)[:, :width].contiguous()


def _blocks(values: Tensor) -> Tensor:
    """[rows, blocks, columns], filled up with zeros; a shard may have no rows."""
    width = values.shape[1]
    columns = min(_BLOCK, width)
    return functional.pad(values, (0, -width % columns)).unflatten(1, (-1, columns))


def _scales(parameter: Tensor) -> Tensor:
    """Scales of zero, sharded by rows where the parameter is."""
    width = parameter.shape[1:].numel()
    blocks = -(-width // min(_BLOCK, width))
    if not isinstance(parameter, DTensor):
        return parameter.new_zeros(parameter.shape[0], blocks)
    local = parameter.to_local()
    return DTensor.from_local(
        local.new_zeros(local.shape[0], blocks),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((parameter.shape[0], blocks)),
        stride=(blocks, 1),
    )


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """256 numbers, ascending: 0, 1, and decades between them, each divided half as finely as the next larger one.

    The lowest signed one is -1 in place of a middle of its decade: a block's largest number may be negative.
    """
    bits = 7 if signed else 8
    values = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (bits - 1 - decade) + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0**-decade
        values = torch.cat((values, middles, -middles) if signed else (values, middles))
    values = values.sort().values
    if signed:
        values[0] = -1.0
    return values.to(device, torch.float32)
