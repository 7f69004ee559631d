"""The stalls of a run, as its learners recorded them in `RUN/stalls.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollmesh.learner.liveness.stall_reporter import FILE
from rollmesh.report.metrics import read_metrics

_NO_END = "not known: the learner ended, or it still lasts"


@dataclass(slots=True)
class Stall:
    """A time in which nothing moved.

    Attributes:
        began: Unix time in seconds.
        seconds: that it lasted, as far as is known.
        first: the holders of groups, as reported when it began.
        held: the holders, as last reported.
        ended: how it ended.
    """

    began: float
    seconds: float
    first: str
    held: str
    ended: str = _NO_END


def read_stalls(folder: Path) -> list[Stall]:
    """All stalls of a run folder, in the order of time."""
    stalls: list[Stall] = []
    for record in read_metrics(folder / FILE):
        seconds, text = float(record["seconds"]), str(record["text"])
        if record["event"] == "begins":
            stalls.append(Stall(round(float(record["time"]) - seconds, 3), seconds, text, text))
        elif stalls:
            stalls[-1].seconds = seconds
            if record["event"] == "over":
                stalls[-1].ended = text
            else:
                stalls[-1].held = text
    return stalls


def stall_grid(stalls: Sequence[Stall]) -> list[list[str]]:
    """Stalls as rows of a table; the first is the head."""
    if not stalls:
        return [["none"]]
    head = ["began (UTC)", "lasted", "holders at the beginning", "holders at the end", "how it ended"]
    return [head, *(_row(stall) for stall in stalls)]


def _row(stall: Stall) -> list[str]:
    began = datetime.fromtimestamp(stall.began, UTC)
    return [f"{began:%Y-%m-%d %H:%M:%S}", f"{stall.seconds:.0f} s", stall.first, stall.held, stall.ended]
