"""Flushes the files that a forked process still has open at its end: it does not destroy them, as an interpreter does.

The collector knows them, but shows none that it has frozen. Those of the server are frozen, and no business of the
process; what a service freezes of its own is noted before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

# The base of all kinds of files. It is a plain class, unlike `io.IOBase`, which would ask each object.
_FILE = io.IOBase.__mro__[1]
_noted: list[weakref.ref[Any]] = []
_forked = False


def become_forked() -> None:
    """Begins to note files in this process, which was forked; where it was executed, the interpreter flushes them."""
    global _forked
    _forked = True


def note_files() -> None:
    """Notes open files, which the collector is about to freeze."""
    # Not by the number of frozen objects, to count which takes as long as to load a small model.
    if _forked:
        _noted.extend(map(weakref.ref, _shown()))


def flush_files() -> None:
    """Flushes what was opened since the fork."""
    for file in (*_shown(), *(noted() for noted in _noted)):
        # Closed, or without a reader.
        with contextlib.suppress(Exception):
            file.flush()
    ctypes.CDLL(None).fflush(None)


def _shown() -> Iterator[Any]:
    return (found for found in gc.get_objects() if issubclass(type(found), _FILE))
