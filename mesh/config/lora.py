"""The configuration of low-rank adapters (LoRA): Hu et al. 2021, https://arxiv.org/abs/2106.09685."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section

_KEY = "learner.lora"


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

    start_from: Path | None = Field(
        None,
        description="Folder with an adapter of the same rank, scale and layers, as peft writes it, with whose values "
        "training begins. None: a new one, which changes nothing at first.",
    )
    push: Literal["full", "merged", "served"] = Field(
        "merged",
        description="Bytes that a version of the policy is, and what generators do with them. `merged`: the adapter "
        "alone, which each generator merges into the base that it got once. `served`: the same bytes, and the engine "
        "(`vllm`, `sglang`) computes with the adapter next to its base, so that several versions live at once. `full`: "
        "all weights, merged by the learner; generators know of no adapter.",
    )

    @property
    def scale(self) -> float:
        """The factor of the products."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def adapter_form(lora: LoraSection | None) -> dict[str, str]:
    """Settings on which the shapes and the meaning of an adapter's weights depend, by key of the configuration."""
    if lora is None:
        return {_KEY: "none"}
    settings = lora.model_dump(mode="json", exclude={"start_from", "push"})
    return {_KEY: "trained", **{f"{_KEY}.{name}": str(value) for name, value in settings.items()}}
