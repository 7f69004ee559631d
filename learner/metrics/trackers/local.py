"""Trackers of every run: its metrics file and its log."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from rollmesh.learner.metrics.trackers.interface import Record, Tracker

log = logging.getLogger(__name__)


class JsonlTracker(Tracker):
    """One JSON object per record, complete lines only; appended to the file of the run's earlier learners."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # the last writer was killed in the middle of a line
            self._file.write("\n")

    def log(self, step: int, record: Record) -> None:
        self._file.write(json.dumps({"step": step, **_finite(record)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ConsoleTracker(Tracker):
    """A plain log line at a fixed interval of steps, and one for each evaluation."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps

    def log(self, step: int, record: Record) -> None:
        if "eval/reward" in record:
            log.info("step %d: held-out reward %.3f", step, record["eval/reward"])
        elif "critic/score/mean" in record and (step % self._every == 0 or step == 1):
            log.info(
                "step %d: reward %.3f, response length %.1f, staleness %.2f, %.0f tokens/s, waited %.0f of %.0f ms",
                step,
                record["critic/score/mean"],
                record["response_length/mean"],
                record["staleness/mean"],
                record["tokens_per_second"],
                1e3 * record["timing_s/gen"],
                1e3 * record["timing_s/step"],
            )
        elif "steps" in record and (step % self._every == 0 or step in (1, record["steps"])):
            log.info(
                "step %d of %d: loss %.4f%s, lr %.2e, %.0f tokens/s",
                step,
                record["steps"],
                record.get("actor/loss", math.nan),
                _accuracy(record),
                record.get("actor/lr", math.nan),
                record["perf/throughput"],
            )
        if "eval/loss" in record:
            log.info("step %d: held-out loss %.4f%s", step, record["eval/loss"], _accuracy(record, "eval/"))


def _accuracy(record: Record, prefix: str = "") -> str:
    """The share of pairs whose chosen response has the greater reward; empty where a command has no pairs."""
    found = record.get(f"{prefix}rewards/accuracies")
    return "" if found is None else f", accuracy {found:.3f}"


def _finite(record: Record) -> dict[str, Any]:
    """JSON has no NaN: such values become null, which every reader understands."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
