"""The vision part of a model in training: features of a micro-batch's images become the embeddings of their tokens.

All images of a micro-batch pass through the vision part at once; where processes share it, each computes those of some
prompts. Invariants: only the prompts' own image tokens are
replaced. One that was sampled is a token like any other. Ranks that shard a model compute its vision part equally
often: one without images in a micro-batch computes an image whose features are used nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollmesh.learner.batching.types import PackedImages, PromptImages
from rollmesh.learner.vision.families import ModelInputs, SyntheticImage, VisionFamily
from rollmesh.learner.vision.prompts import locate_images
from rollmesh.mesh.errors import DataError


class ImageDivision(Protocol):
    """The images of a micro-batch that processes share, as one of them sees it."""

    @property
    def first(self) -> int:
        """Place in the row of the first token that this process computes."""

    def own_prompts(self, features: Sequence[int]) -> list[int]:
        """Prompts whose images this process computes, of those with images."""

    def gather(self, own: Tensor, features: Sequence[int]) -> Tensor:
        """The features of all prompts, from those that this process has computed; collective."""


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of the tokens that a process computes.

    Attributes:
        images: of the whole row.
        division: of them, where processes share the row.
    """

    images: PackedImages
    division: ImageDivision | None = None


class VisionTower:
    """The vision part of a model.

    Args:
        backbone: of the model, which has it.
        family: of the model.
        name: the model, for errors.

    Attributes:
        module: the part itself, without the projection onto the width of the language model.
        grid_positions: see `VisionFamily`.
    """

    def __init__(self, backbone: PreTrainedModel, family: VisionFamily, name: str) -> None:
        self._backbone: Any = backbone
        self._family = family
        self._name = name
        self.grid_positions = family.grid_positions
        self.module: nn.Module = backbone.get_submodule(family.tower)

    def embed(self, input_ids: Tensor, of_row: RowImages) -> Tensor:
        """Input embeddings of a packed row, or of a part of it.

        Args:
            input_ids: int64 [1, n].
            of_row: its images.

        Returns:
            [1, n, hidden].

        Raises:
            DataError: the vision part makes fewer features than there are places.
        """
        embedded: Tensor = self._backbone.get_input_embeddings()(input_ids)
        images, division = of_row.images, of_row.division if of_row.images.inputs else None
        prompts = range(len(images.inputs)) if division is None else division.own_prompts(images.features)
        own, count = [images.inputs[prompt] for prompt in prompts], sum(images.features[prompt] for prompt in prompts)
        features = self._features(self.whole_inputs(own or [self.synthesize(0).inputs]), embedded)
        if len(features) < count or (own and len(features) > count):
            raise DataError(
                f"model {self._name!r} makes {len(features)} features of images for {count} tokens",
                hint="the folder's processor files do not fit its model",
            )
        features = features[:count].to(embedded.dtype)
        if division is None:
            return _placed(embedded, images.places, features)
        tokens = embedded.shape[1]
        places = images.places - division.first
        # Features of other parts' tokens go to a token after this part's: the host need not know how many these are.
        places = torch.where((places >= 0) & (places < tokens), places, tokens)
        widened = functional.pad(embedded, (0, 0, 0, 1))
        return _placed(widened, places, division.gather(features, images.features))[:, :tokens]

    def whole_inputs(self, prompts: Sequence[ModelInputs]) -> dict[str, Tensor]:
        """The vision part's input for the images of several prompts, on the host."""
        return self._family.nest({name: torch.cat([inputs[name] for inputs in prompts]) for name in prompts[0]})

    def synthesize(self, seed: int) -> SyntheticImage:
        """An image of random pixels."""
        return self._family.synthesize(self._backbone.config, torch.Generator().manual_seed(seed))

    def add_synthetic(self, prompt: NDArray[np.int32], seed: int) -> tuple[NDArray[np.int32], PromptImages]:
        """Adds an image of random pixels to a prompt, after its first token.

        Args:
            prompt: int32 [P].
            seed: of the pixels.
        """
        image = self.synthesize(seed)
        tokens = np.full(image.features, self.image_token, dtype=np.int32)
        ids = np.concatenate([prompt[:1], tokens, prompt[1:]])
        return ids, locate_images(ids, image.inputs, self._backbone.config, self._family)

    @property
    def no_images(self) -> PackedImages:
        """The images of a row without any, whose vision part is computed all the same."""
        device = self._backbone.get_input_embeddings().weight.device
        return PackedImages((), (), torch.zeros(0, dtype=torch.int64, device=device))

    @property
    def image_token(self) -> int:
        """Id of the token that stands for a feature."""
        token: int = self._backbone.config.image_token_id
        return token

    def _features(self, inputs: ModelInputs, embedded: Tensor) -> Tensor:
        """[tokens, hidden] of all images, concatenated."""
        moved = {
            name: value.to(embedded.device, embedded.dtype if value.is_floating_point() else value.dtype)
            for name, value in inputs.items()
        }
        found: Any = self._backbone.get_image_features(**moved).pooler_output
        parts = list(found) if isinstance(found, list | tuple) else [found]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _placed(embedded: Tensor, places: Tensor, features: Tensor) -> Tensor:
    return embedded.index_put((torch.zeros_like(places), places), features)
