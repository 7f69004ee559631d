"""The trajectories that every contender stores: the same arrays, from numpy alone (peers run in other environments).

A response of T tokens has ids with a Zipf-like spread over a vocabulary of 152,064, and incompressible log-probs. A
quarter of the tokens masked is masked (a tool's output, say), and the policy version changes once, in the middle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCABULARY = 152_064
# Different trajectories that a writer cycles through.
DISTINCT = 8


def make_arrays(tokens: int, seed: int) -> dict[str, Any]:
    """int32 `ids`, float32 `log_probs`, uint8 `mask`, int32 `versions`, each [tokens], and a scalar `reward`."""
    random = np.random.default_rng(seed)
    position = np.arange(tokens)
    return {
        "ids": np.minimum(VOCABULARY * random.random(tokens) ** 3, VOCABULARY - 1).astype(np.int32),
        "log_probs": (-np.abs(random.standard_normal(tokens))).astype(np.float32),
        "mask": (position >= tokens // 4).astype(np.uint8),
        "versions": (position >= tokens // 2).astype(np.int32),
        "reward": np.float32(random.random()),
    }


def raw_bytes(tokens: int) -> int:
    """Bytes of the four arrays and the reward."""
    return 13 * tokens + 4
