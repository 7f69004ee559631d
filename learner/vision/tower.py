"""The vision part of a model in training: features of a micro-batch's images become the embeddings of their tokens.

All images of a micro-batch pass through the vision part at once. Invariants: only the prompts' own image tokens are
replaced. One that was sampled is a token like any other. Ranks that shard a model compute its vision part equally
often: one without images in a micro-batch computes an image whose features are used nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh.learner.batching.types import PackedImages, PromptImages
from rollmesh.learner.vision.families import ModelInputs, SyntheticImage, VisionFamily
from rollmesh.learner.vision.prompts import locate_images
from rollmesh.mesh.errors import DataError


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

    def embed(self, input_ids: Tensor, images: PackedImages) -> Tensor:
        """Input embeddings of a packed row.

        Args:
            input_ids: int64 [1, N].
            images: of the row.

        Returns:
            [1, N, hidden].

        Raises:
            DataError: the vision part makes fewer features than there are places.
        """
        embedded: Tensor = self._backbone.get_input_embeddings()(input_ids)
        features = self._features(self.whole_inputs(images.inputs or [self.synthesize(0).inputs]), embedded)
        places = images.places
        if len(features) < len(places) or (images.inputs and len(features) > len(places)):
            raise DataError(
                f"model {self._name!r} makes {len(features)} features of images for {len(places)} tokens",
                hint="the folder's processor files do not fit its model",
            )
        return embedded.index_put((torch.zeros_like(places), places), features[: len(places)].to(embedded.dtype))

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
        return PackedImages((), torch.zeros(0, dtype=torch.int64, device=device))

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
