"""Images of prompts: what is told of those that cannot be read, and how many pixels a prompt may have."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory import images
from rollmesh.mesh.trajectory.images import open_images


def white(width: int, height: int, form: str = "PNG") -> bytes:
    """An encoded image of one bit per pixel."""
    file = io.BytesIO()
    Image.new("1", (width, height), 1).save(file, form)
    return file.getvalue()


def test_an_image_of_no_known_format_has_the_same_cause_every_time() -> None:
    """Causes are counted by their words: none of them names a place in memory."""
    with pytest.raises(PayloadError, match=r"images: an image that cannot be read: 5 bytes of no known format"):
        open_images([b"words"])


def test_images_are_opened_as_rgb_in_their_order() -> None:
    forms = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    opened = open_images([white(2, 3 + number, form) for number, form in enumerate(forms)])
    assert [(image.mode, image.size) for image in opened] == [("RGB", (2, 3 + number)) for number in range(6)]
    assert open_images([]) == []


def test_pixels_of_a_prompt_count_together_and_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 8 kB may have 64 million of them: the limit of bytes says nothing about memory."""
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 24)
    assert len(open_images([white(3, 4)] * 2)) == 2
    header_alone = white(5, 5)[:-20]
    with pytest.raises(PayloadError, match=r"2 of its 3 images have 37 pixels, .* 24 together") as refused:
        open_images([white(3, 4), header_alone, b"never opened"])
    assert refused.value.hint == "scale them down"


def test_a_form_that_is_decoded_as_soon_as_it_is_opened_is_not_read() -> None:
    with pytest.raises(PayloadError, match="no known format"):
        open_images([white(64, 64, "ICO")])
