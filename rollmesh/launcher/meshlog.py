"""`mesh.jsonl`: what the launcher saw of the mesh, once per look: the generators' side of a run.

Invariant: totals never fall. A generator's own counters start anew with its process, so they are summed over all
processes that were ever seen, also those of an earlier launch in the same run folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.launcher.monitor import Snapshot
from rollmesh.report.metrics import read_metrics

FILE = "mesh.jsonl"
_TOTALS = {"generated_tokens": "tokens_generated", "gate_wait_s": "gate_wait_seconds"}


class MeshLog:
    """Appends one line per look.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        earlier = read_metrics(self._path)
        self._before = {name: float(earlier[-1].get(name, 0.0)) if earlier else 0.0 for name in _TOTALS}
        self._seen: dict[str, dict[str, float]] = {}

    def add(self, snapshot: Snapshot, now: float) -> None:
        """Books what a look has shown; a look that failed is left out.

        Args:
            now: Unix time in seconds.
        """
        if snapshot.table is None:
            return
        generators = snapshot.generators()
        for member in generators:
            self._seen[member.member_id] = {name: member.gauges.get(gauge, 0.0) for name, gauge in _TOTALS.items()}
        totals = {name: self._before[name] + sum(figures[name] for figures in self._seen.values()) for name in _TOTALS}
        counts = snapshot.table.counts
        entry = {
            "time": round(now, 3),
            "version": snapshot.table.policy.version,
            "generators": len(generators),
            **totals,
            "generating": counts.generating,
            "ready": counts.ready,
            "learner_waits": snapshot.table.learner_waits,
            "generators_wait": snapshot.table.generators_wait,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
