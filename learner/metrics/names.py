"""Second names: records carry a figure also under the name that a peer's dashboards look for."""

from __future__ import annotations

import functools
from typing import Any

from rollmesh.learner.metrics.catalogue import describe
from rollmesh.learner.metrics.trackers import Record


def with_aliases(record: Record) -> dict[str, Any]:
    """The record followed by its aliases; a name that the record has itself is never overwritten."""
    second = {alias: value for name, value in record.items() for alias in _aliases(name)}
    return {**record, **{alias: value for alias, value in second.items() if alias not in record}}


@functools.lru_cache(maxsize=4096)
def _aliases(name: str) -> tuple[str, ...]:
    metric = describe(name)
    return () if metric is None else tuple(metric.aliases_of(name))
