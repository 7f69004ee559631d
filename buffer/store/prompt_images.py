"""Images of prompts as files next to Redis: a stored prompt has their digests, and a generator gets the images.

The learner gets digests alone. Its ranks read the images that they train on from files of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.image_files import ImageFiles
from rollmesh.protos import trajectory_pb2 as trajectory

log = logging.getLogger(__name__)
# Field 15, of 32 bytes: how the first digest begins in a serialized task. Texts may hold it too, which costs a parse.
_DIGEST = bytes((15 << 3 | 2, 32))


class PromptImages:
    """The images of one front.

    Args:
        folder: shared by all fronts of the mesh.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ImageFiles(folder)

    async def take_out(self, task: trajectory.PromptTask) -> trajectory.PromptTask:
        """A task with digests in place of its images, which are files from now on.

        Raises:
            StoreError: the disk does not take them.
        """
        if not task.images:
            return task
        digests = await asyncio.to_thread(self._files.write, list(task.images))
        stored = trajectory.PromptTask()
        stored.CopyFrom(task)
        del stored.images[:]
        stored.image_digests[:] = digests
        return stored

    async def put_back(self, prompts: Mapping[str, bytes]) -> dict[str, bytes]:
        """Serialized tasks with their images; those with an image that is lost are left out."""
        found = {}
        for name, prompt in prompts.items():
            try:
                found[name] = await asyncio.to_thread(self._with_images, prompt) if _DIGEST in prompt else prompt
            except DataError as error:
                log.error("a prompt cannot be rolled out: %s", error)
        return found

    def _with_images(self, prompt: bytes) -> bytes:
        task = trajectory.PromptTask.FromString(prompt)
        task.images.extend(self._files.read(task.image_digests))
        whole: bytes = task.SerializeToString()
        return whole
