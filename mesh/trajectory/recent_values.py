"""A cache of values that were used last, bounded by their bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class RecentValues(Generic[_Key, _Value]):
    """Makes values, and keeps those that were used last. For any thread; two may make the same value at once.

    Args:
        make: the value of a key.
        size: bytes of a key and its value.
        limit: bytes of all that are kept. The last one is kept whatever its size.
    """

    def __init__(self, make: Callable[[_Key], _Value], size: Callable[[_Key, _Value], int], limit: int) -> None:
        self._make = make
        self._size = size
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: _Key) -> _Value:
        """The value of a key, made where it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        value = self._make(key)
        size = self._size(key, value)
        with self._lock:
            _, before = self._kept.pop(key, (value, 0))
            self._kept[key] = value, size
            self._bytes += size - before
            while self._bytes > self._limit and len(self._kept) > 1:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed
        return value
