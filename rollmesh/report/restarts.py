"""The restarts of a run's services, over all launches, as the launcher records them in `RUN/restarts.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from rollmesh.report.metrics import MetricsTail, read_metrics

Reason = Literal["exit", "frozen", "hung"]
"""Reasons of a restart: the service ended, did not answer and was killed, or found itself hanging and ended."""
_FILE = "restarts.jsonl"


def record_restart(folder: Path, service: str, reason: Reason, now: float) -> None:
    """Records that a service is started again.

    Args:
        reason: why it ended.
        now: Unix time in seconds.
    """
    with (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(now, 3), "service": service, "reason": reason}) + "\n")


def read_restarts(folder: Path) -> dict[str, dict[str, int]]:
    """Numbers of restarts by service and reason; services without any are left out."""
    restarts: dict[str, dict[str, int]] = {}
    for record in read_metrics(folder / _FILE):
        if not {"service", "reason"} <= record.keys():
            continue
        reasons = restarts.setdefault(str(record["service"]), {})
        reasons[str(record["reason"])] = reasons.get(str(record["reason"]), 0) + 1
    return restarts


class RestartsTail:
    """Follows the restarts of a run folder, from now on.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = MetricsTail(folder / _FILE, from_end=True)

    def read(self) -> list[float]:
        """Unix times of the restarts since the call before."""
        return [float(record["time"]) for record in self._tail.read()]
