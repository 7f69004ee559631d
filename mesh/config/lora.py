"""The configuration of low-rank adapters (LoRA): Hu et al. 2021, https://arxiv.org/abs/2106.09685."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section


class LoraSection(Section):
    rank: PositiveInt = Field(16, description="Rank r of the products that are added to the weights of layers.")
    alpha: PositiveFloat = Field(32.0, description="Products are multiplied by alpha / rank.")
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="Layers that get an adapter: `all-linear`, every linear layer of the transformer's blocks, or the "
        "last parts of their names, for example `[q_proj, v_proj]`.",
    )
    rank_stabilized: bool = Field(
        False, description="Products are multiplied by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."
    )

    @property
    def scale(self) -> float:
        """The factor of the products."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)
