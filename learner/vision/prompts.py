"""Prompts with images as a model sees them: their tokens, and the inputs of its vision part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import PromptImages
from rollmesh.learner.vision.families import ModelInputs, VisionFamily, family_of
from rollmesh.learner.vision.positions import grid_positions
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.trajectory.images import ImageProcessor


def locate_images(ids: NDArray[np.int32], inputs: ModelInputs, config: Any, family: VisionFamily) -> PromptImages:
    """The images of a prompt, with the places and positions of its tokens.

    Args:
        ids: int32 [P], the prompt with the tokens of its images.
        inputs: of all its images, with images along the first dimension.
        config: of the model.
        family: of the model.

    Raises:
        ValueError: the tokens do not fit the images' grids.
    """
    image_tokens = ids == config.image_token_id
    positions = None
    if family.grid_positions:
        grids = [(time, height, width) for time, height, width in inputs["image_grid_thw"].tolist()]
        positions = grid_positions(image_tokens, grids, config.vision_config.spatial_merge_size)
    return PromptImages(inputs, np.flatnonzero(image_tokens), positions)


class PromptReader:
    """Reads prompts with images by the processor of a model.

    Args:
        processor: of the model's folder.
        config: of the model.
        family: of the model.
    """

    def __init__(self, processor: ImageProcessor, config: Any, family: VisionFamily) -> None:
        self._processor = processor
        self._config = config
        self._family = family

    @classmethod
    def load(cls, folder: Path) -> PromptReader | None:
        """The reader of a model's folder; None: it is trained on text alone.

        Raises:
            DataError: its configuration or its processor's files cannot be read.
        """
        config = read_config(folder)
        family = family_of(config)
        processor = ImageProcessor.load(folder) if family is not None else None
        return None if family is None or processor is None else cls(processor, config, family)

    def read(self, placeholders: Sequence[int], images: tuple[bytes, ...]) -> tuple[NDArray[np.int32], PromptImages]:
        """A prompt as the model sees it.

        Args:
            placeholders: token ids with one placeholder per image.
            images: encoded.

        Returns:
            Its tokens, int32 [P], and its images.

        Raises:
            PayloadError: an image cannot be read, or the processor makes other tokens of it than the model expects.
        """
        ids = np.asarray(self._processor.widened(placeholders, images), dtype=np.int32)
        inputs = self._family.split_nesting(self._processor.inputs(images))
        try:
            return ids, locate_images(ids, inputs, self._config, self._family)
        except ValueError as error:
            raise PayloadError("images", f"their tokens do not fit their pixels: {error}") from error
