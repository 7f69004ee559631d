"""`mesh.jsonl`: the launcher's snapshots of the mesh: the generators' side of a run.

Invariants: totals never fall. A generator's counters start at 0 with its process. So they are summed over all processes
ever seen, also those of an earlier launch in the same run folder. The waiting clocks are the buffer's. A full disk
loses lines until a write succeeds again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.report.metrics import read_metrics
from rollmesh.run_files import SNAPSHOTS

_TOTAL = "generated_tokens"
_GAUGE = "tokens_generated"


class MeshLog:
    """Appends one line per snapshot.

    Args:
        folder: run folder.
        notify: called when lines can no longer be written, and when they can again.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._path = folder / SNAPSHOTS
        self._notify = notify
        self._trouble = ""
        earlier = read_metrics(self._path)
        self._before = float(earlier[-1].get(_TOTAL, 0.0)) if earlier else 0.0
        self._seen: dict[str, float] = {}

    def add(self, snapshot: Snapshot, now: float) -> float:
        """Appends a snapshot; one that failed is left out.

        Args:
            now: Unix time in seconds.

        Returns:
            Tokens that the run has sampled so far.
        """
        if snapshot.table is None:
            return self._total_generated
        for member in snapshot.generators():
            self._seen[member.member_id] = member.gauges.get(_GAUGE, 0.0)
        self._append({**entry_of(snapshot, now), _TOTAL: self._total_generated})
        return self._total_generated

    def _append(self, entry: Mapping[str, Any]) -> None:
        before = self._trouble
        # A failed write may have left half a line.
        line = ("\n" if before else "") + json.dumps(entry) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._trouble = ""
        except OSError as error:
            self._trouble = error.strerror or str(error)
        if self._trouble and not before:
            self._notify(f"{SNAPSHOTS} is not written: {self._trouble}; every second it is tried again")
        elif before and not self._trouble:
            self._notify(f"{SNAPSHOTS} is written again")

    @property
    def _total_generated(self) -> float:
        return self._before + sum(self._seen.values())


def entry_of(snapshot: Snapshot, now: float) -> dict[str, Any]:
    """The line about a mesh that has answered, without the sampled tokens of the whole run.

    Args:
        snapshot: of the mesh.
        now: Unix time in seconds.
    """
    table, rewards = snapshot.table, snapshot.rewards()
    assert table is not None, "the mesh has answered"
    return {
        "time": round(now, 3),
        "version": table.policy.version,
        "generators": len(snapshot.generators()),
        "gate_wait_s": table.waiting_for_samples_ms / 1000,
        "learner_wait_s": table.waiting_for_inserts_ms / 1000,
        # Unlike the wait above: nothing is decoded meanwhile.
        "idle_s": round(snapshot.sum_of("gate_wait_seconds"), 3),
        "active_sequences": snapshot.sum_of("active_sequences"),
        "members_unscored": snapshot.sum_of("members_unscored"),
        "reward_workers": sum(member.gauges.get("reward_workers", 0.0) for member in rewards),
        "reward_busy_s": round(sum(member.gauges.get("reward_busy_seconds", 0.0) for member in rewards), 3),
        "generating": table.counts.generating,
        "ready": table.counts.ready,
        "learner_waits": table.learner_waits,
        "generators_wait": table.generators_wait,
    }
