"""Positions of tokens in time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1): pure index arithmetic.

Tokens of text have one position in all three. The tokens of an image lie on a grid that begins after the text before
it. The text after it begins after the largest position so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def grid_positions(
    image_tokens: NDArray[np.bool_], grids: Sequence[tuple[int, int, int]], merge: int
) -> NDArray[np.int64]:
    """Positions of a prompt's tokens.

    Args:
        image_tokens: bool [P], which tokens are an image's; those of two images do not touch.
        grids: per image its patches in time, height and width.
        merge: patches, in height and in width, that become one token.

    Returns:
        int64 [3, P].

    Raises:
        ValueError: the grids have more or fewer tokens than the prompt.
    """
    positions = np.empty((3, len(image_tokens)), dtype=np.int64)
    place = following = 0
    for time, height, width in grids:
        shape = (time, height // merge, width // merge)
        ahead = image_tokens[place:]
        text = int(ahead.argmax()) if ahead.any() else len(ahead)
        count = int(np.prod(shape))
        begin = place + text
        if not image_tokens[begin : begin + count].all() or begin + count > len(image_tokens):
            raise ValueError(f"an image of {count} tokens, and the prompt has fewer at token {begin}")
        positions[:, place:begin] = following + np.arange(text)
        positions[:, begin : begin + count] = following + text + np.indices(shape).reshape(3, -1)
        following += text + max(shape[1:])
        place = begin + count
    if image_tokens[place:].any():
        raise ValueError(f"{int(image_tokens[place:].sum())} tokens of images after those of the last one")
    positions[:, place:] = following + np.arange(len(image_tokens) - place)
    return positions
