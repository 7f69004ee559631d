"""Text for the terminal, written to a stream by a thread of its own.

Invariants: no call raises or waits for the reader, except `close`, which waits for a bounded time. Text that is not
read is dropped, the oldest first. Missing lines are counted, and their number is written before the next text. A write
that fails is `write_error` until one succeeds again.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# Characters that wait for a reader.
_KEPT = 256 << 10
_END_S = 2.0
_STDERR = 2


@contextlib.contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """Redirects this process' stderr, to which libraries write, into a file, which no reader holds up."""
    with contextlib.ExitStack() as until_end:
        with contextlib.suppress(OSError):
            file = until_end.enter_context(path.open("ab"))
            before = os.dup(_STDERR)
            until_end.callback(os.close, before)
            os.dup2(file.fileno(), _STDERR)
            until_end.callback(os.dup2, before, _STDERR)
        yield


class BufferedOutput:
    """A buffer before a stream.

    Args:
        stream: the destination of the text.
        kept: characters that wait for the reader at most.
        end_s: seconds that `close` waits for the reader.

    Attributes:
        write_error: the reason why the latest text was not written; empty if it was.
    """

    def __init__(self, stream: TextIO, *, kept: int = _KEPT, end_s: float = _END_S) -> None:
        self.write_error = ""
        self.encoding = stream.encoding or "utf-8"
        self._stream = stream
        # A thread that is caught in a write to a standard stream of Python would hold its lock at the exit.
        self._raw = stream in (sys.__stdout__, sys.__stderr__)
        self._kept, self._end_s = kept, end_s
        self._waiting: deque[str] = deque()
        self._size = self._missing = 0
        self._closed = False
        self._changed = threading.Condition()
        with contextlib.suppress(OSError):
            stream.flush()
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def flush(self) -> None:
        """Does nothing: text waits for the reader alone."""

    def write(self, text: str) -> int:
        """Queues text."""
        with self._changed:
            self._waiting.append(text)
            self._size += len(text)
            while self._size > self._kept:
                self._drop(self._pop())
            self._changed.notify()
        return len(text)

    def close(self) -> None:
        """Gives the reader a moment for the text that still waits."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self._end_s)

    def _pop(self) -> str:
        text = self._waiting.popleft()
        self._size -= len(text)
        return text

    def _drop(self, text: str) -> None:
        self._missing += text.count("\n")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                text = self._pop()
                missing, self._missing = self._missing, 0
            # Between two drawings of a live table there is no place for a notice.
            notice = f"... lines that could not be written are missing here: {missing}\n" if missing else ""
            try:
                self._write(text if self.isatty() else notice + text)
                self.write_error = ""
            except (OSError, ValueError) as error:
                self.write_error = getattr(error, "strerror", None) or str(error)
                with self._changed:
                    self._missing += missing
                    self._drop(text)

    def _write(self, text: str) -> None:
        data = text.encode(self.encoding, "replace")
        if not self._raw:
            self._stream.write(data.decode(self.encoding))
            self._stream.flush()
            return
        descriptor = self._stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(descriptor, select.POLLOUT)
                writable.poll()
