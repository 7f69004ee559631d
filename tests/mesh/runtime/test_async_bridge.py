"""The bridge from synchronous code to an event loop in a thread."""

import asyncio

import pytest

from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge


def test_the_bridge_returns_results_errors_and_deadlines() -> None:
    bridge = AsyncBridge()

    async def value() -> int:
        return 3

    async def failing() -> None:
        raise KeyError("x")

    assert bridge.call(value(), 5) == 3
    with pytest.raises(KeyError):
        bridge.call(failing(), 5)
    with pytest.raises(UnreachableError, match="no result"):
        bridge.call(asyncio.sleep(60), 0.05)
    bridge.close()
