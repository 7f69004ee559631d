"""Prompts with images as the language model sees them: the vision part's features stand at their tokens' places.

Invariant: only the prompt's own image tokens are replaced. One that was sampled is a token like any other, also where
it is run through the model again after its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rollmesh.generators.engines.errors import EngineError
from rollmesh.mesh.trajectory.images import ImageProcessor


class Vision:
    """The vision part of a model.

    Args:
        model: one with images that take plain positions and are seen causally.
        processor: of the same folder.
    """

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor) -> None:
        self._model: Any = model
        self._processor = processor
        self._token: int = model.config.image_token_id

    def embedded(self, input_ids: torch.Tensor, images: Sequence[tuple[bytes, ...]]) -> torch.Tensor:
        """Input embeddings of widened prompts.

        Args:
            input_ids: int64 [sequences, columns]; the image tokens of a sequence's images stand before all others.
            images: encoded, of each sequence.

        Returns:
            [sequences, columns, hidden].

        Raises:
            EngineError: the vision part makes more or fewer features than the processor made tokens.
        """
        embedded: torch.Tensor = self._model.get_input_embeddings()(input_ids)
        for row, given in enumerate(images):
            if given:
                features = self._features(given)
                places = (input_ids[row] == self._token).nonzero()[: len(features), 0]
                if len(places) != len(features):
                    raise EngineError(
                        f"{len(features)} features of images for {len(places)} tokens",
                        hint="the folder's processor files do not fit its model",
                    )
                embedded[row, places] = features.to(embedded.dtype)
        return embedded

    def _features(self, images: tuple[bytes, ...]) -> torch.Tensor:
        """[tokens, hidden] of all images, concatenated."""
        model = self._model
        inputs = {
            name: value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)
            for name, value in self._processor.inputs(images).items()
        }
        features: Any = model.get_image_features(**inputs).pooler_output
        parts = list(features) if isinstance(features, list | tuple) else [features]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
