"""Images of rows in every form that datasets have: recognized when a row is read, loaded when it is encoded.

Forms: a path (relative ones from the dataset's folder), encoded bytes, `{bytes, path}`, a `data:` URL, base64 of a
file. They stand in the row's `images`, in the order of their marks, or in the parts of its messages (`image`,
`image_url`).
A mark is a part `{type: image}`, or `<image>` within a text.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.data.locations import stays_inside
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.images import MAX_IMAGE_BYTES

MARK = "<image>"
# A file, or its bytes.
ImageSource = Path | bytes
# First characters of base64 of PNG, JPEG, GIF and WebP files.
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_IMAGE_PARTS = ("image", "image_url")


def image_source(value: Any, folder: Path, *, confined: bool = False) -> ImageSource:
    """The source of an image of a row.

    Args:
        value: as the row has it.
        folder: from which relative paths lead.
        confined: a path may not leave the folder.

    Raises:
        ValueError: its form is unknown, or its path leaves the folder.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        return image_source(content if content is not None else value.get("path"), folder, confined=confined)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"is {type(value).__name__}, expected a path, bytes, {{bytes, path}}, a data URL or base64")
    encoded = value.partition(",")[2] if value.startswith("data:") else value
    if encoded is not value or value.startswith(_BASE64):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"is not valid base64: {error}") from error
    if "://" in value:
        raise ValueError("is a URL: images are not fetched from the network")
    if confined and not stays_inside(value):
        raise ValueError(f"names {value}, which lies outside of the dataset")
    return folder / value


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with lists of parts as contents: images as parts without content, and that content separately.

    Args:
        messages: contents are strings, or lists of parts; None in a message of calls alone.

    Returns:
        The messages, and the content of their image parts (None for an empty part), in their order.

    Raises:
        ValueError: a part is neither text nor image.
    """
    found: list[dict[str, Any]] = []
    brought: list[Any] = []
    for message in messages:
        content = message["content"]
        if content is None:
            found.append(dict(message))
            continue
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts: list[dict[str, Any]] = []
        for part in given:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts = part["text"].split(MARK)
                brought += [None] * (len(texts) - 1)
                for index, text in enumerate(texts):
                    parts += [{"type": "image"}] if index else []
                    parts += [{"type": "text", "text": text}] if text else []
            elif kind in _IMAGE_PARTS:
                value = part.get("image_url") if kind == "image_url" else part.get("image")
                brought.append(value.get("url", value) if isinstance(value, Mapping) else value)
                parts.append({"type": "image"})
            else:
                raise ValueError(f"has a part of type {kind!r}, expected text, image or image_url")
        found.append({**message, "content": parts})
    return found, brought


def load_images(origin: str, sources: Sequence[ImageSource]) -> tuple[bytes, ...]:
    """The encoded images of a row.

    Args:
        origin: the row, for errors.
        sources: of its images.

    Raises:
        DataError: a file cannot be read, or they are too large to travel with their prompt.
    """
    try:
        size = sum(len(source) if isinstance(source, bytes) else _file_size(origin, source) for source in sources)
        if size > MAX_IMAGE_BYTES:
            raise DataError(
                f"{origin}: its images have {size} bytes, at most {MAX_IMAGE_BYTES} can travel with a prompt",
                hint="scale them down, or store them as JPEG",
            )
        return tuple(source if isinstance(source, bytes) else source.read_bytes() for source in sources)
    except OSError as error:
        raise DataError(f"{origin}: an image cannot be read: {error}", hint="see `images` of the row") from error


def _file_size(origin: str, path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        # A pipe is waited for, and a device may have no end.
        raise DataError(f"{origin}: image {path} is no regular file", hint="see `images` of the row")
    return status.st_size
