"""Divisions of a model over a number of ranks, those that exchange least first; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.learner.engines.megatron.requirements import ModelFacts, resolve_sizes
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

_RESET = {"vpp": 1, "layers": None, "dp": None, "sp": None, "shards": None}
"""What depends on the sizes that are searched."""


def divisions(parallel: ParallelSection, ranks: int, per_node: int, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Keys of `learner.parallel` for the divisions that the model and the ranks allow.

    The smaller the product of `tp`, `pp` and `ep`, the earlier. With equal products, experts are divided before
    matrices, and both before layers. `tp` and `ep` stay within a node. `cp` and `etp` are as configured.

    Args:
        parallel: as configured.
        ranks: of the learner.
        per_node: of these, on each node.
        facts: of the model.

    Yields:
        The keys that the configuration has otherwise; empty for the configured division.
    """
    tensor = _divisors(per_node)
    stages = [number for number in _divisors(ranks) if number <= max(facts.layers, 1)]
    experts = _divisors(math.gcd(per_node, facts.experts)) if facts.experts else [1]
    candidates = [(tp, pp, ep) for tp in tensor for pp in stages for ep in experts]
    for tp, pp, ep in sorted(candidates, key=lambda sizes: (math.prod(sizes), sizes[1], sizes[0])):
        if tp * pp > ranks or ep * pp > ranks:
            continue
        keys = {"tp": tp, "pp": pp, "ep": ep} | _RESET
        try:
            resolve_sizes(parallel.model_copy(update=keys), ranks, facts)
        except ConfigError:
            continue
        yield {key: value for key, value in keys.items() if getattr(parallel, key) != value}


def in_parallel(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `learner.parallel` with their place in the configuration."""
    return {f"learner.parallel.{key}": value for key, value in keys.items()}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
