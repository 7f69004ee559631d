"""Vision-language models that can be trained: where their vision part is, and the form of its inputs.

In all of them the features of an image take the places of its tokens, and attention is causal. Video is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Generator, Tensor

ModelInputs: TypeAlias = "Mapping[str, Tensor]"
"""Inputs of a vision part by their names in transformers: `pixel_values` and the like."""


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """An image of random pixels, as a vision part takes it.

    Attributes:
        inputs: with images along the first dimension.
        features: tokens that it becomes.
    """

    inputs: ModelInputs
    features: int


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Models of one kind.

    Attributes:
        tower: name of the vision part within the backbone.
        synthesize: makes an image for a model's configuration.
        nested: inputs have a dimension of prompts before that of images.
        grid_positions: tokens of images have positions in time, height and width (Qwen2-VL, arXiv:2409.12191).
    """

    tower: str
    synthesize: Callable[[Any, Generator], SyntheticImage]
    nested: bool = False
    grid_positions: bool = False

    def split_nesting(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """The inputs of one prompt, from a processor, with images along the first dimension."""
        return {name: value[0] if self.nested else value for name, value in inputs.items()}

    def nest(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Inputs as the model takes them; inverse of `split_nesting`."""
        return {name: value[None] if self.nested else value for name, value in inputs.items()}


def family_of(config: Any) -> VisionFamily | None:
    """The family of a Hugging Face configuration; None: such models are trained on text alone."""
    return FAMILIES.get(config.model_type)


def _square(config: Any, generator: Generator) -> SyntheticImage:
    """A square image of the size of the vision part's configuration, in patches (LLaVA, Idefics3)."""
    import torch

    vision = config.vision_config
    side = vision.image_size // vision.patch_size // getattr(config, "scale_factor", 1)
    pixels = torch.rand(1, 3, vision.image_size, vision.image_size, generator=generator)
    return SyntheticImage({"pixel_values": pixels}, side * side)


def _patches(config: Any, generator: Generator) -> SyntheticImage:
    """A row of patches for each place of a grid, here of 2 by 3 tokens (Qwen2-VL)."""
    import torch

    vision = config.vision_config
    merge = vision.spatial_merge_size
    height, width = 2 * merge, 3 * merge
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.rand(height * width, values, generator=generator)
    grid = torch.tensor([[1, height, width]])
    return SyntheticImage({"pixel_values": pixels, "image_grid_thw": grid}, 6)


FAMILIES: Mapping[str, VisionFamily] = {
    "llava": VisionFamily("vision_tower", _square),
    "idefics3": VisionFamily("vision_model", _square, nested=True),
    "smolvlm": VisionFamily("vision_model", _square, nested=True),
    "qwen2_vl": VisionFamily("visual", _patches, grid_positions=True),
    "qwen2_5_vl": VisionFamily("visual", _patches, grid_positions=True),
}
"""By the `model_type` of transformers."""
