"""Reading the logs of services: the tail, and the error a service ended with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rollmesh.mesh.liveness.process_ends import signal_name

_TAIL_BYTES = 64 << 10
# A line of the form for people.
_TEXT = re.compile(r"\d\d:\d\d:\d\d ([DIWEC]) [^:]+: (.*)$")
_LEVELS = {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}
# The last line of a traceback.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: .*)?$")


def tail(path: Path, lines: int = 20, *, since: int = 0) -> list[str]:
    """The last lines of a file; empty where it cannot be read.

    Args:
        since: bytes of the file that others wrote before.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def explain_exit(status: int, lines: Sequence[str]) -> tuple[str, bool]:
    """The cause of a process' end with `status`, from its last log lines, and whether it is complete."""
    if status < 0:
        return f"killed by signal {signal_name(-status)}", False
    how = f"exited with status {status}"
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: "), True
        entry = _entry(line)
        if entry.get("level") in ("error", "critical"):
            return str(entry.get("message", "")), True
        if _RAISED.match(line):  # an error that no one foresaw: the traceback says where
            return f"{how}: {line}", False
    return how, False


def readable(line: str) -> str:
    """A JSON log line as a person reads it; other lines as they are."""
    entry = _entry(line)
    if "message" not in entry:
        return line
    return f"{entry.get('level', '')}: {entry['message']}"


def _entry(line: str) -> dict[str, object]:
    """Level and message of a line of either form (`mesh.runtime.log_format`)."""
    if match := _TEXT.match(line):
        return {"level": _LEVELS[match[1]], "message": match[2]}
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
