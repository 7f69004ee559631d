"""Images of prompts: encoded files in transit, pixels and tokens once a model's processor has read them.

A prompt holds one placeholder token per image; what its processor makes of the image ("widening") takes its place
where the model runs. Pillow and transformers are imported when the first image is met.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.trajectory.recent_values import RecentValues

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# Bytes of all images of one prompt: they travel and are stored with it.
MAX_IMAGE_BYTES = 4 << 20
MAX_IMAGE_PIXELS = 64_000_000
"""Pixels of all images of one prompt, which are in memory at once: 4 bytes each, and more in a processor."""
# Forms in which Pillow decodes nothing when it opens a file, and runs no other program: not ICO, not EPS.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_CONFIGS = ("processor_config.json", "preprocessor_config.json")
PROCESSOR_FILES = (*_CONFIGS, "video_preprocessor_config.json", "chat_template.json", "chat_template.jinja")
"""Files of a model's folder that belong to its processor, not to its tokenizer alone."""
# Bytes of processed images that a process keeps, because the members of a group follow each other. One of 12 megapixels
# may have 300 MB.
_KEPT_BYTES = 256 << 20


def open_images(encoded: Sequence[bytes]) -> list[Image]:
    """The pixels of a prompt's images, encoded as PNG, JPEG, WebP, GIF, BMP or TIFF files, as RGB.

    Invariant: none is decoded before the headers of all have said how many pixels they have.

    Raises:
        PayloadError: one cannot be read, or they have too many pixels.
    """
    headers: list[Image] = []
    pixels = 0
    for file in encoded:
        headers.append(_read_header(file))
        pixels += headers[-1].width * headers[-1].height
        if pixels > MAX_IMAGE_PIXELS:
            count = f"{len(headers)} of its {len(encoded)} images have {pixels} pixels"
            raise PayloadError(
                "images", f"{count}, a prompt's images may have {MAX_IMAGE_PIXELS} together", hint="scale them down"
            )
    return [_decode(image) for image in headers]


def _read_header(encoded: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(encoded), formats=_FORMATS)
    except UnidentifiedImageError as error:
        # Its own words name the place of the bytes in memory.
        raise _unreadable(f"{len(encoded)} bytes of no known format") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(error) from error


def _decode(image: Image) -> Image:
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise _unreadable(error) from error
    return image.convert("RGB")


def _unreadable(cause: object) -> PayloadError:
    return PayloadError("images", f"an image that cannot be read: {cause}")


def digest_tokens(ids: Sequence[int]) -> str:
    """The digest of a prompt as the model sees it: `SeenPrompt.digest` of the contract."""
    import numpy as np
    import xxhash

    return xxhash.xxh3_64_hexdigest(np.asarray(ids, dtype="<i4").tobytes())


def check_seen(ids: Sequence[int], digest: str) -> None:
    """Refuses a prompt whose images became other tokens than the learner's processor has made of them.

    Args:
        ids: the prompt with the tokens of its images.
        digest: from the prompt's task; empty: not known.

    Raises:
        PayloadError: they differ.
    """
    if digest and digest_tokens(ids) != digest:
        raise PayloadError(
            "images",
            f"their prompt has {len(ids)} tokens here, which are not those of the learner's processor",
            hint="install the same transformers everywhere, and keep the model's processor files as they are",
        )


def has_processor(folder: Path) -> bool:
    """A model folder has the files of a processor; without them it takes text alone."""
    return any((folder / name).is_file() for name in _CONFIGS)


_Processed: TypeAlias = "tuple[list[tuple[int, ...]], Mapping[str, torch.Tensor]]"
"""The tokens of each image, and the inputs of the model's vision part for all together."""


class ImageProcessor:
    """The image part of a model's processor. For any thread.

    Args:
        processor: transformers' own.

    Attributes:
        token: text that stands for an image, one token in the vocabulary.
        placeholder: id of that token.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        # Where the two differ, one opens an image and the other fills it.
        self.token: str = getattr(processor, "boi_token", None) or processor.image_token
        self.placeholder: int = processor.tokenizer.convert_tokens_to_ids(self.token)
        self._processed = RecentValues(self._process, _size, _KEPT_BYTES)

    @classmethod
    def load(cls, folder: Path) -> ImageProcessor | None:
        """The processor of a model folder; None if it has none, or one that takes no images.

        Raises:
            DataError: its files are there but cannot be read.
        """
        if not has_processor(folder):
            return None
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(f"{folder}: the processor cannot be loaded: {error}") from error
        if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
            return None
        return cls(processor)

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template; None if it has no template."""
        template: str | None = getattr(self._processor, "chat_template", None)
        return template

    def check_places(self, ids: Sequence[int], images: tuple[bytes, ...]) -> None:
        """Looks at no image.

        Raises:
            PayloadError: there are not as many as placeholders.
        """
        places = sum(token == self.placeholder for token in ids)
        if places != len(images):
            raise PayloadError("images", f"{len(images)} images for {places} placeholders ({self.token}) in the prompt")

    def widened(self, ids: Sequence[int], images: tuple[bytes, ...]) -> list[int]:
        """A prompt in which each placeholder has become the tokens of its image; takes tens of milliseconds per image.

        Raises:
            PayloadError: an image cannot be read, or there are not as many as placeholders.
        """
        self.check_places(ids, images)
        if not images:
            return list(ids)
        runs = iter(self._processed.get(images)[0])
        return [wide for token in ids for wide in (next(runs) if token == self.placeholder else (token,))]

    def inputs(self, images: tuple[bytes, ...]) -> Mapping[str, torch.Tensor]:
        """The inputs of the model's vision part for these images, all together: `pixel_values` and the like.

        Raises:
            PayloadError: an image cannot be read.
        """
        return self._processed.get(images)[1]

    def _process(self, images: tuple[bytes, ...]) -> _Processed:
        opened = open_images(images)
        together = self._call(opened)
        inputs = {
            name: value
            for name, value in together.items()
            if name not in ("input_ids", "attention_mask", "token_type_ids")
        }
        alone = [together] if len(opened) == 1 else [self._call([image]) for image in opened]
        return [tuple(one["input_ids"][0].tolist()) for one in alone], inputs

    def _call(self, images: list[Image]) -> Mapping[str, torch.Tensor]:
        try:
            found: Mapping[str, torch.Tensor] = self._processor(
                text=self.token * len(images), images=images, add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, TypeError) as error:
            raise PayloadError("images", f"the model's processor does not take them: {error}") from error
        return found


def _size(images: tuple[bytes, ...], processed: _Processed) -> int:
    return sum(map(len, images)) + sum(tensor.nbytes for tensor in processed[1].values())
