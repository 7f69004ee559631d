"""AdamW with moments in bfloat16: half their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.engines.fsdp2.optimizers.compact_adamw import CompactAdamW

# bfloat16 is the upper half of float32.
_LOWER_HALF = 0xFFFF


class RoundedAdamW(CompactAdamW):
    """AdamW with moments in bfloat16."""

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}

    def _read(self, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return kept["exp_avg"].float(), kept["exp_avg_sq"].float()

    def _write(self, kept: dict[str, Tensor], first: Tensor, second: Tensor, generator: torch.Generator) -> None:
        kept["exp_avg"].copy_(round_stochastically(first, generator))
        kept["exp_avg_sq"].copy_(round_stochastically(second, generator))


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """bfloat16 of float32: one of the two neighbours, so that the expectation is the value.

    Args:
        values: float32, finite; overwritten.
        generator: of the values' device.
    """
    noise = torch.randint(
        0, _LOWER_HALF + 1, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = values.view(torch.int32).add_(noise).bitwise_and_(~_LOWER_HALF)
    return bits.view(torch.float32).to(torch.bfloat16)
