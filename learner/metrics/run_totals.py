"""Totals of the whole run that end in `learner.json`, carried over restarts by the checkpoint."""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.learner.weights.push_statistics import PushSummary
from rollmesh.mesh.files import write_atomically


@dataclass(slots=True)
class RunTotals:
    """Totals over all learners of the run.

    Attributes:
        steps: batches trained on the surviving lineage.
        groups, samples, tokens: trained.
        staleness: trained tokens by staleness.
        wall_s: seconds from the first version to the last, of the learners before this one.
        learner_wait_s: seconds this program waited for groups.
        evals: every finished evaluation round.
    """

    steps: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    wall_s: float = 0.0
    learner_wait_s: float = 0.0
    evals: list[dict[str, Any]] = field(default_factory=list)
    _began: float | None = None

    def start_clock(self) -> None:
        """Starts the clock: the first version of this learner has been published."""
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first version of the run to now, time between learners left out."""
        return self.wall_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def add_step(self, *, groups: int, samples: int, tokens: int, staleness: Mapping[int, int], wait_s: float) -> None:
        """Adds one trained batch."""
        self.steps += 1
        self.groups += groups
        self.samples += samples
        self.tokens += tokens
        self.staleness.update(staleness)
        self.learner_wait_s += wait_s

    def to_wire(self) -> dict[str, Any]:
        """The totals as JSON, for the checkpoint."""
        return {
            "steps": self.steps,
            "groups": self.groups,
            "samples": self.samples,
            "tokens": self.tokens,
            "staleness": {str(age): count for age, count in sorted(self.staleness.items())},
            "wall_s": self.elapsed_s,
            "learner_wait_s": self.learner_wait_s,
            "evals": list(self.evals),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RunTotals:
        """Inverse of `to_wire`."""
        return cls(
            steps=int(wire["steps"]),
            groups=int(wire["groups"]),
            samples=int(wire["samples"]),
            tokens=int(wire["tokens"]),
            staleness=Counter({int(age): int(count) for age, count in wire["staleness"].items()}),
            wall_s=float(wire["wall_s"]),
            learner_wait_s=float(wire["learner_wait_s"]),
            evals=list(wire["evals"]),
        )


def write_learner_json(
    path: Path,
    run_totals: RunTotals,
    *,
    incarnation: int,
    version: int,
    stop_reason: str,
    pushes: PushSummary,
    receivers: Mapping[str, Any],
    waiting: Mapping[str, float],
    refused_prompts: Mapping[str, int],
) -> None:
    """Writes the learner's part of the run's summary, atomically.

    Args:
        path: `learner.json` of the run folder.
        run_totals: of the run.
        incarnation, version: of the last published weights.
        stop_reason: steps, stop_at, end_of_data, signal or request.
        pushes: what generators reported of the weights they received.
        receivers: the same by generator.
        waiting: the buffer's cumulative clocks, in seconds.
        refused_prompts: prompts skipped, by reason.
    """
    wire = run_totals.to_wire()
    content = {
        "steps": wire["steps"],
        "groups_trained": wire["groups"],
        "samples_trained": wire["samples"],
        "tokens_trained": wire["tokens"],
        "wall_seconds": wire["wall_s"],
        "tokens_per_second": wire["tokens"] / wire["wall_s"] if wire["wall_s"] else 0.0,
        "incarnation": incarnation,
        "version": version,
        "stop_reason": stop_reason,
        "eval_first": run_totals.evals[0] if run_totals.evals else None,
        "eval_last": run_totals.evals[-1] if run_totals.evals else None,
        "evals": run_totals.evals,
        "staleness_tokens": wire["staleness"],
        "waiting": {**waiting, "learner_s": run_totals.learner_wait_s},
        "pushes": {
            "count": pushes.count,
            "errors": pushes.errors,
            "bytes": pushes.bytes,
            **pushes.metrics(),
            "receivers": receivers,
        },
        "refused_prompts": dict(refused_prompts),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
