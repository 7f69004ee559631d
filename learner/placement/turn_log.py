"""`RUN/turns.jsonl`: one line for each change of phase of shared devices."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)
FILE = "turns.jsonl"


class TurnLog:
    """Writes the changes of phase of one run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._refused = False

    def write(self, *, turn: int, phase: str, reason: str = "") -> None:
        """Appends a change; a disk that refuses is reported once, and changes nothing.

        Args:
            turn: its number.
            phase: that begins.
            reason: why, where a swap is taken back.
        """
        line = json.dumps({"unix_s": round(time.time(), 3), "turn": turn, "phase": phase, "reason": reason})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._refused:
                log.warning("%s lacks changes of phase: %s", self._path, error.strerror)
            self._refused = True
