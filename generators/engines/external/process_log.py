"""The log of an engine's processes: its end, and the last error in it."""

from __future__ import annotations

import re
from pathlib import Path

# The traceback of a server is up to 10 KB long, and other lines follow.
_SEARCHED = 32_000
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The line of a traceback that names the error.
_RAISED = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::.*)?$", re.MULTILINE)
_LONGEST = 300


def tail(file: Path, nbytes: int) -> str:
    """The log's last bytes as text without colours; empty without a log file."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, file.stat().st_size - nbytes))
            return _COLOUR.sub("", source.read().decode("utf-8", "replace"))
    except OSError:
        return ""


def last_error(file: Path) -> str:
    """The last error, by the tracebacks near the end of the log; empty without one."""
    raised = _RAISED.findall(tail(file, _SEARCHED))
    return raised[-1][:_LONGEST] if raised else ""
