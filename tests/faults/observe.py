"""Records that the mesh leaves while it runs, read as it grows: trained steps, and members that the fronts stored.

Invariants: complete lines only; a line is read once. A front writes its line before it answers the generator, so every
acknowledged trajectory is in the record, whatever is killed then.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
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
        """Lines that have come since the last call; nothing while there is no file."""
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
    """Follows `metrics.jsonl` in a thread of its own.

    Attributes:
        steps: so far.
        evaluations: rounds that were finished so far.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._news = threading.Condition()
        self._closing = threading.Event()
        self.steps: list[Step] = []
        self.evaluations = 0
        self._thread = threading.Thread(target=self._follow, name="steps", daemon=True)
        self._thread.start()

    def wait_step(self, after: float, until: float, *, nth: int = 1, incarnation: int = 0) -> Step:
        """The nth step seen after a time (both monotonic), of this incarnation or a later one.

        Raises:
            FaultError: it did not come in time.
        """
        with self._news:
            while True:
                since = bisect_right(self.steps, after, key=lambda step: step.seen)
                found = [step for step in self.steps[since:] if step.incarnation >= incarnation]
                if len(found) >= nth:
                    return found[nth - 1]
                if not self._news.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise FaultError(f"no step was trained for {until - after:.0f} s")

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
            if records:
                with self._news:
                    self.evaluations += sum("eval/version" in record for record in records)
                    self.steps += new
                    self._news.notify_all()


@dataclass(frozen=True, slots=True)
class Stored:
    """A member that a front has stored.

    Attributes:
        group, member, attempt: which.
        scored: it has a payload that may be trained.
        at: when the front said so, in seconds since 1970.
    """

    group: str
    member: int
    attempt: int
    scored: bool
    at: float = 0.0


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
        """Generator (the service) -> monotonic time of its last write."""

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
        at = float(entry["time"])
        generator = str(entry["member_id"]).rpartition("-")[0]
        self.last[generator] = max(self.last.get(generator, 0.0), time.monotonic() - (time.time() - at))
        self.stored += [Stored(str(g), int(m), int(a), bool(s), at) for g, m, a, s in entry["stored"]]

    def wait_write(self, generator: str, after: float, until: float) -> float:
        """The time of a write of a generator after `after` (all monotonic).

        Raises:
            FaultError: none came in time.
        """
        while True:
            self.read()
            if (last := self.last.get(generator, 0.0)) > after:
                return last
            if time.monotonic() > until:
                raise FaultError(f"{generator} stored nothing for {until - after:.0f} s")
            time.sleep(_POLL_S)
