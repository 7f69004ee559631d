"""`mesh.jsonl`: what the launcher saw of the mesh, once per look: the generators' side of a run.

Invariant: totals never fall. A generator's counters start anew with its process, so they are summed over all processes
that were ever seen, also those of an earlier launch in the same run folder; the waiting clocks are the buffer's.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.launcher.monitor import Snapshot
from rollmesh.report.metrics import read_metrics

FILE = "mesh.jsonl"
_TOTAL = "generated_tokens"
_GAUGE = "tokens_generated"


class MeshLog:
    """Appends one line per look.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        earlier = read_metrics(self._path)
        self._before = float(earlier[-1].get(_TOTAL, 0.0)) if earlier else 0.0
        self._seen: dict[str, float] = {}

    def add(self, snapshot: Snapshot, now: float) -> float:
        """Books what a look has shown; a look that failed is left out.

        Args:
            now: Unix time in seconds.

        Returns:
            Tokens that the run has sampled so far.
        """
        if snapshot.table is None:
            return self._generated
        generators = snapshot.generators()
        self._seen.update({member.member_id: member.gauges.get(_GAUGE, 0.0) for member in generators})
        counts = snapshot.table.counts
        entry = {
            "time": round(now, 3),
            "version": snapshot.table.policy.version,
            "generators": len(generators),
            _TOTAL: self._generated,
            "gate_wait_s": snapshot.table.waiting_for_samples_ms / 1000,
            "learner_wait_s": snapshot.table.waiting_for_inserts_ms / 1000,
            "generating": counts.generating,
            "ready": counts.ready,
            "learner_waits": snapshot.table.learner_waits,
            "generators_wait": snapshot.table.generators_wait,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return self._generated

    @property
    def _generated(self) -> float:
        return self._before + sum(self._seen.values())
