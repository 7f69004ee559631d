"""Images of prompts: what is told of one that cannot be read."""

from __future__ import annotations

import pytest

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import open_image


def test_an_image_of_no_known_format_has_the_same_cause_every_time() -> None:
    """Causes are counted by their words: none of them names a place in memory."""
    with pytest.raises(PayloadError, match=r"images: an image that cannot be read: 5 bytes of no known format"):
        open_image(b"words")
