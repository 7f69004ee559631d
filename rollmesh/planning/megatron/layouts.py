"""Divisions of a model over a number of ranks, those that exchange least first; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from operator import itemgetter
from typing import Any

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.requirements import ModelFacts, resolve_sizes
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

_RESET = {"vpp": 1, "layers": None, "etp": None, "dp": None, "sp": None, "shards": None}
"""Keys that depend on the sizes that are searched."""


def divisions(parallel: ParallelSection, ranks: int, per_node: int, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Keys of `learner.parallel` for the divisions that the model and the ranks allow.

    The fewer ranks hold a copy of the model together, the earlier. With as many ranks, fewer stages come first, then
    less division of matrices, then more division of experts. `tp` and `ep` stay within a node. `cp` is as configured.

    Args:
        parallel: as configured.
        ranks: of the learner.
        per_node: of these, on each node.
        facts: of the model.

    Yields:
        The keys that the configuration has otherwise; empty for the configured division.
    """
    stages = [number for number in _divisors(ranks) if number <= max(facts.layers, 1)]
    experts = _divisors(math.gcd(per_node, facts.experts)) if facts.experts else [1]
    allowed = []
    for tp, pp, ep in product(_divisors(per_node), stages, experts):
        keys = {"tp": tp, "pp": pp, "ep": ep} | _RESET
        try:
            sizes = resolve_sizes(parallel.model_copy(update=keys), ranks, facts)
        except ConfigError:
            continue
        allowed.append(((copy_size(sizes), pp, tp, -ep), keys))
    for _, keys in sorted(allowed, key=itemgetter(0)):
        yield {key: value for key, value in keys.items() if getattr(parallel, key) != value}


def copy_size(sizes: ParallelSizes) -> int:
    """Ranks that hold a copy of the model together."""
    return sizes.pp * max(sizes.tp, sizes.ep * sizes.etp)


def in_parallel(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `learner.parallel` with their place in the configuration."""
    return {f"learner.parallel.{key}": value for key, value in keys.items()}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
