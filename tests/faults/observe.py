"""What the mesh leaves behind while it runs, read as it grows: trained steps, and members that the fronts stored.

Invariants: complete lines only; a line is read once. A front writes its line before it answers the generator, so every
acknowledged trajectory is in the record, whatever is killed then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.processes import FaultError

_POLL_S = 0.05
_STORED = '"members stored"'


class Tail:
    """The complete lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """What has come since the last call; nothing while there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield line
        except FileNotFoundError:
            return


@dataclass(frozen=True, slots=True)
class Step:
    """One trained step.

    Attributes:
        seen: monotonic time at which its record was found.
        incarnation, version: of the weights that it made.
        oldest: age of its oldest token in versions.
    """

    seen: float
    incarnation: int
    version: int
    oldest: int


class StepWatch:
    """Follows `metrics.jsonl` in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._news = threading.Condition()
        self._closing = threading.Event()
        self.steps: list[Step] = []
        self._thread = threading.Thread(target=self._follow, name="steps", daemon=True)
        self._thread.start()

    def wait_step(self, after: float, deadline_s: float, *, incarnation: int = 0) -> Step:
        """The first step seen after a time (monotonic), of this incarnation or a later one.

        Raises:
            FaultError: none came in time.
        """
        until = time.monotonic() + deadline_s
        index = 0
        with self._news:
            while True:
                for step in self.steps[index:]:
                    if step.seen > after and step.incarnation >= incarnation:
                        return step
                index = len(self.steps)
                if not self._news.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise FaultError(f"no step was trained within {deadline_s:.0f} s")

    def between(self, begin: float, end: float) -> int:
        """Steps seen in a time (monotonic)."""
        with self._news:
            return sum(begin < step.seen <= end for step in self.steps)

    @property
    def incarnation(self) -> int:
        """The newest that has trained; 0 before the first step."""
        with self._news:
            return max((step.incarnation for step in self.steps), default=0)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)

    def _follow(self) -> None:
        while not self._closing.wait(_POLL_S):
            records = [json.loads(line) for line in self._tail.lines()]
            now = time.monotonic()
            new = [
                Step(now, int(r["incarnation"]), int(r["version"]), int(r["staleness/max"]))
                for r in records
                if "staleness/max" in r
            ]
            if new:
                with self._news:
                    self.steps += new
                    self._news.notify_all()


@dataclass(frozen=True, slots=True)
class Stored:
    """A member that a front has stored.

    Attributes:
        group, member, attempt: which.
        scored: it has a payload that may be trained.
    """

    group: str
    member: int
    attempt: int
    scored: bool


class WriteRecord:
    """Every member that any front stored, from the fronts' debug logs.

    Args:
        logs: folder with `front-*.log`.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._tails: dict[Path, Tail] = {}
        self.stored: list[Stored] = []
        self.last: dict[str, float] = {}
        """Member id of a generator -> monotonic time at which its last write was found."""

    def read(self) -> None:
        """Takes up what has come since the last call."""
        for path in sorted(self._logs.glob("front-*.log")):
            tail = self._tails.setdefault(path, Tail(path))
            for line in tail.lines():
                if _STORED.encode() in line:
                    self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        if entry["table"] != "train" or not entry["stored"]:
            return
        self.last[entry["member_id"]] = time.monotonic()
        self.stored += [Stored(str(g), int(m), int(a), bool(s)) for g, m, a, s in entry["stored"]]

    def wait_write(self, member_id: str, after: float, deadline_s: float) -> float:
        """The time (monotonic) at which a write of a generator after `after` was found.

        Raises:
            FaultError: none came in time.
        """
        until = time.monotonic() + deadline_s
        while True:
            self.read()
            if (last := self.last.get(member_id, 0.0)) > after:
                return last
            if time.monotonic() > until:
                raise FaultError(f"{member_id} stored nothing within {deadline_s:.0f} s")
            time.sleep(_POLL_S)
