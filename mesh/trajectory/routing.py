"""The experts to which generators route tokens, as they travel: side data of members, and never through Redis.

A member has the rows of its response, and one member of a group those of the prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUTED_EXPERTS = "routed_experts"
"""Side data: the experts of the response's tokens, [T - 1, layers, experts per token]; of engines the prompt's too."""
PROMPT_EXPERTS = "prompt_experts"
"""Side data: the experts of the prompt's tokens, [P, layers, experts per token]."""

_DIMENSIONS = 3


def split_prompt(experts: NDArray[Any], prompt_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows of the prompt, and those of the response, of [prompt + T - 1, layers, experts per token]."""
    return experts[:prompt_tokens], experts[prompt_tokens:]


def readable(experts: object, tokens: int) -> NDArray[np.int16] | None:
    """Experts of so many tokens as a learner computes with them; None: these are none.

    Args:
        experts: as they came.
        tokens: of the prompt, or those of the response but its last.
    """
    if not isinstance(experts, np.ndarray) or experts.ndim != _DIMENSIONS or len(experts) != tokens:
        return None
    if experts.dtype.kind not in "iu":
        return None
    return experts.astype(np.int16)
