"""Images of a micro-batch that processes share: each computes those of some prompts, and gets the features of all.

Invariant: the collectives are the same in all processes of the group, whichever of them compute images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rollmesh.learner.engines.fsdp2.ulysses.exchange import Exchange


def parts_of_prompts(features: Sequence[int], parts: int) -> list[int]:
    """The part that computes the images of each prompt: neighbours together, as even as whole prompts allow.

    Args:
        features: of the images of each prompt.
        parts: processes that share the micro-batch.
    """
    ends = np.cumsum(features)
    middles = ends - np.asarray(features) / 2
    found: list[int] = np.minimum(middles * parts // max(int(ends[-1]), 1), parts - 1).astype(int).tolist()
    return found


@dataclass(frozen=True, slots=True)
class DividedImages:
    """The division of a micro-batch's images, as one process sees it.

    Attributes:
        exchange: with the others.
        first: place of this part's first token in the row.
    """

    exchange: Exchange
    first: int

    def own_prompts(self, features: Sequence[int]) -> list[int]:
        """Prompts whose images this process computes.

        Args:
            features: of the images of each prompt, at least one.
        """
        owners = parts_of_prompts(features, self.exchange.parts)
        return [prompt for prompt, owner in enumerate(owners) if owner == self.exchange.part]

    def gather(self, own: Tensor, features: Sequence[int]) -> Tensor:
        """The features of all prompts, [F, H], from those of this process, [f, H]; collective."""
        owners = parts_of_prompts(features, self.exchange.parts)
        counts = np.bincount(owners, weights=features, minlength=self.exchange.parts).astype(int)
        return self.exchange.gather_rows(own, counts.tolist())
