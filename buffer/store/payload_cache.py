"""Payloads that this front stored lately: what is handed on soon need not be read back from Redis.

What counts under a key never changes, so a copy is as good as the original. A cache and nothing more: what is not here
is in Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

# What a front keeps at most; the oldest goes first.
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
        """Redis has just stored these values under these keys, and they count."""
        for key, value in stored:
            self.bytes += len(value) - len(self._values.get(key, b""))
            self._values[key] = value
        while self.bytes > self._limit:
            self.bytes -= len(self._values.popitem(last=False)[1])

    def pop(self, key: str) -> bytes | None:
        """The value, which is not kept any longer: as a rule it is asked for once."""
        value = self._values.pop(key, None)
        if value is not None:
            self.bytes -= len(value)
        return value

    def clear(self) -> None:
        """Redis may not have what it had acknowledged."""
        self._values.clear()
        self.bytes = 0
