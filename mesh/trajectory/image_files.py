"""Images of prompts as files, found by the digest of their bytes, so that only digests travel.

Invariants: a file appears whole or not at all, and what is read is what was written. Equal images are one file.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError, StoreError

# Digests come from the network, and become paths.
_DIGEST = re.compile(r"[0-9a-f]{32}")
IMAGES_NAME = "images"
"""Folder of the images among the run's side data."""


def image_folder(config: Config) -> Path:
    """The folder of a run's images."""
    return (config.buffer.side_dir or config.run.folder / "side") / IMAGES_NAME


class ImageFiles:
    """The images of a run.

    Args:
        folder: made when the first image comes; the same for all who write and read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, images: Iterable[bytes]) -> list[str]:
        """Writes those that are not there yet; returns the digests of all.

        Raises:
            StoreError: the disk refuses.
        """
        digests = []
        for image in images:
            digest = xxhash.xxh3_128_hexdigest(image)
            path = self._path(digest)
            try:
                if not path.is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    part = path.with_name(f"{uuid.uuid4().hex}.part")
                    part.write_bytes(image)
                    os.replace(part, path)
            except OSError as error:
                raise StoreError(
                    f"an image cannot be written to {self.folder}: {error.strerror}",
                    hint="free space there, or move buffer.side_dir",
                ) from error
            digests.append(digest)
        return digests

    def read(self, digests: Sequence[str]) -> tuple[bytes, ...]:
        """The images with these digests.

        Raises:
            DataError: one is not there, or not what was written, or a digest is none.
        """
        images = []
        for digest in digests:
            if not _DIGEST.fullmatch(digest):
                raise DataError(f"{digest[:80]!r} is no digest of an image", hint="the prompt's task is malformed")
            path = self._path(digest)
            try:
                image = path.read_bytes()
            except OSError as error:
                raise DataError(
                    f"no image at {path}: {error.strerror}",
                    hint="every rank of the learner needs the same folder: set buffer.side_dir to one that all share",
                ) from error
            if xxhash.xxh3_128_hexdigest(image) != digest:
                raise DataError(f"{path} is not the image that was written", hint="remove the file, or the folder")
            images.append(image)
        return tuple(images)

    def _path(self, digest: str) -> Path:
        # Thousands of files in a folder are slow on some file systems.
        return self.folder / digest[:2] / digest
