"""Events as lines of a file, for callbacks in another process than the learner's.

Invariant: a line is one event, complete, and in the order in which the learner's callbacks hear of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.learner.callbacks.interface import (
    Callback,
    CommittedCheckpoint,
    EvaluationEnd,
    Event,
    PublishedVersion,
    RunControl,
    RunEnd,
    RunStart,
    StepEnd,
)

EVENTS = "events.jsonl"
"""The file, in the run's folder."""
_NAME = "event"
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (RunStart, StepEnd, PublishedVersion, EvaluationEnd, CommittedCheckpoint, RunEnd)
}


class EventWriter(Callback):
    """Appends every event of a run to its `events.jsonl`; a callback like any other."""

    def _append(self, run: RunControl, event: Any) -> None:
        line = json.dumps({_NAME: type(event).__name__, **dataclasses.asdict(event)}, default=str)
        with (run.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    on_run_start = on_step_end = on_version_published = on_evaluation_end = _append
    on_checkpoint_committed = on_run_end = _append


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """The event of a line; None where it is none that is known."""
    values = dict(line)
    kind = _KINDS.get(values.pop(_NAME, ""))
    if kind is None:
        return None
    if kind is CommittedCheckpoint:
        values["folder"] = Path(values["folder"])
    event: Event = kind(**values)
    return event
