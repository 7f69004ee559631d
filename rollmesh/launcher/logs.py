"""Reading the logs of services: the tail, and the error a service ended with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

_TAIL_BYTES = 64 << 10


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def explain_exit(status: int, lines: Sequence[str]) -> tuple[str, str]:
    """(what happened, hint) for a process that ended with `status` and these last log lines."""
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: "), ""
        entry = _entry(line)
        if entry.get("level") in ("error", "critical"):
            return str(entry.get("message", "")), ""
    if status < 0:
        return f"killed by {_signal_name(-status)}", ""
    return f"exited with status {status}", ""


def readable(line: str) -> str:
    """A JSON log line as a person reads it; other lines as they are."""
    entry = _entry(line)
    if "message" not in entry:
        return line
    return f"{entry.get('level', '')}: {entry['message']}"


def _entry(line: str) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
