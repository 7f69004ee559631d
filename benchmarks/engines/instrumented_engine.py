"""A vLLM engine whose swaps tell what they consist of, and whose KV policy can be changed between two passes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from rollmesh.generators.engines.types import KvPolicy
from rollmesh.generators.engines.vllm.engine import VllmEngine

# Calls that are awaited in a swap, by the name in the results: the attribute with the method, and the method.
_PARTS = {
    "interrupt": ("_scheduler", "interrupt"),
    "halt": ("_backend", "pause"),
    "send": ("_sender", "send"),
    "caches": ("_backend", "_reset_caches"),
    "resume": ("_backend", "resume"),
}


class MeasuredEngine(VllmEngine):
    """Look at `parts` once weights are in service, and `instrument` has been called.

    Attributes:
        parts: seconds of each part of every swap.
    """

    parts: dict[str, list[float]]

    def instrument(self) -> None:
        """From here on; nothing is being swapped."""
        self.parts = defaultdict(list)
        backend: Any = self._backend
        owners = {
            "_scheduler": self._thread.executor._scheduler,
            "_backend": backend,
            "_sender": backend._sender,
        }
        for part, (owner, name) in _PARTS.items():
            setattr(owners[owner], name, self._timed(part, getattr(owners[owner], name)))

    def use(self, kv: KvPolicy) -> None:
        """The policy of the swaps to come; nothing is being swapped."""
        self._thread.executor._kv = kv

    def _timed(self, part: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return await call(*arguments, **named)
            finally:
                self.parts[part].append(time.perf_counter() - begin)

        return timed
