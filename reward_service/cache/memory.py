"""Scores in memory: those that were not used for longest leave when there are too many bytes."""

from __future__ import annotations

from collections import OrderedDict

# Bytes of an entry besides key and value: two objects of Python and their place in the table.
_ENTRY_BYTES = 240


class MemoryStore:
    """A table of at most `max_bytes`.

    Attributes:
        bytes: of all entries.
        evicted: entries that had to leave.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> bytes | None:
        """A value, which is the last to leave now; None where there is none."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Keeps a value, unless it alone is too large."""
        self.remove(key)
        size = _size(key, value)
        if size > self._max_bytes:
            return
        self._values[key] = value
        self.bytes += size
        while self.bytes > self._max_bytes:
            self.bytes -= _size(*self._values.popitem(last=False))
            self.evicted += 1

    def remove(self, key: bytes) -> None:
        """Drops a value, if there is one."""
        if (value := self._values.pop(key, None)) is not None:
            self.bytes -= _size(key, value)


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
