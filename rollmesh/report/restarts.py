"""The restarts of a run's services, over all launches, as the launcher notes them in `RUN/restarts.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from rollmesh.report.metrics import read_metrics

Reason = Literal["exit", "frozen", "hung"]
"""It ended, it did not answer and was killed, or it found itself hanging and ended."""
_FILE = "restarts.jsonl"


def note_restart(folder: Path, service: str, reason: Reason, now: float) -> None:
    """Notes that a service is started again.

    Args:
        reason: why it ended.
        now: Unix time in seconds.
    """
    with (folder / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(now, 3), "service": service, "reason": reason}) + "\n")


def read_restarts(folder: Path) -> dict[str, dict[str, int]]:
    """How often each service was started again, by reason; those that never were are left out."""
    restarts: dict[str, dict[str, int]] = {}
    for record in read_metrics(folder / _FILE):
        reasons = restarts.setdefault(str(record["service"]), {})
        reasons[str(record["reason"])] = reasons.get(str(record["reason"]), 0) + 1
    return restarts
