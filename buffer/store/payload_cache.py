"""A cache of the payloads that this front stored last, so that they need not be read back from Redis.

Invariant: values are immutable once the write that names them has counted, so a cached copy is never wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

# Bytes that a front caches at most; the oldest value goes first.
KEPT_BYTES = 64 << 20


class PayloadCache:
    """Values by key.

    Args:
        limit: bytes kept at most.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def put(self, stored: Iterable[tuple[str, bytes]]) -> None:
        """Caches values that Redis has just stored under these keys, and that count."""
        for key, value in stored:
            self.bytes += len(value) - len(self._values.get(key, b""))
            self._values[key] = value
        while self.bytes > self._limit:
            self.bytes -= len(self._values.popitem(last=False)[1])

    def pop(self, key: str) -> bytes | None:
        """Removes and returns a value: it is usually read once."""
        value = self._values.pop(key, None)
        if value is not None:
            self.bytes -= len(value)
        return value

    def clear(self) -> None:
        """Drops all values: Redis may have lost acknowledged writes."""
        self._values.clear()
        self.bytes = 0
