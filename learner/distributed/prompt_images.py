"""Prompts of a rank's share of a plan as its models see them: images are read from files, by their digests.

Invariant: the tokens of a prompt are those that its generator has answered, or the group is not trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import PromptImages
from rollmesh.learner.distributed.train_plan import PlannedPrompt
from rollmesh.learner.vision.prompts import PromptReader
from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.trajectory.image_files import ImageFiles
from rollmesh.mesh.trajectory.images import check_seen

PromptOrError = tuple[NDArray[np.int32], PromptImages | None] | PayloadError | DataError
"""Tokens, int32 [P], and images; or why a prompt cannot be read."""
# Images are decoded and scaled in C.
_THREADS = 4


class PromptImageSource:
    """Reads the prompts with images of one model.

    Args:
        reader: of the model.
        files: of the run's images.
    """

    def __init__(self, reader: PromptReader, files: ImageFiles) -> None:
        self._reader = reader
        self._files = files

    @classmethod
    def load(cls, model: Path, images: Path) -> PromptImageSource | None:
        """The source of a run; None: its model takes text alone.

        Args:
            model: folder of the model.
            images: folder of the run's images.

        Raises:
            DataError: see `PromptReader.load`.
        """
        reader = PromptReader.load(model)
        return None if reader is None else cls(reader, ImageFiles(images))

    def get(self, prompt: PlannedPrompt) -> PromptOrError:
        """A prompt with images."""
        try:
            found = self._reader.read(prompt.array().tolist(), self._files.read(prompt.images))
            check_seen(found[0].tolist(), prompt.seen)
        except (PayloadError, DataError) as error:
            return error
        return found


def read_prompts(
    prompts: Sequence[PlannedPrompt], chosen: Collection[int], images: PromptImageSource | None
) -> Mapping[int, PromptOrError]:
    """Some of a plan's prompts, by their index.

    Args:
        prompts: of the plan.
        chosen: which of them.
        images: None: the model takes text alone.
    """
    found: dict[int, PromptOrError] = {
        index: (prompts[index].array(), None) for index in chosen if not prompts[index].images
    }
    pictured = [index for index in sorted(chosen) if prompts[index].images]
    if not pictured:
        return found
    if images is None:
        refused = DataError("its prompt has images, and the model is trained on text alone", hint="see docs/vision.md")
        return found | dict.fromkeys(pictured, refused)
    with ThreadPoolExecutor(_THREADS, "prompt-images") as threads:
        return found | dict(zip(pictured, threads.map(images.get, [prompts[index] for index in pictured]), strict=True))
