"""Coroutines that run and end together.

Invariant: none ends silently. A call on a channel that closes raises CancelledError, which asyncio takes for the end of
a task that was cancelled. Here none was, so it is a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollmesh.mesh.errors import UnreachableError


async def run_together(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs all; the first failure cancels the rest and is raised as it was, not wrapped in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(_guard_cancellation(coroutine))
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


async def _guard_cancellation(coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        await coroutine
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UnreachableError("a call ended because its connection was closed") from error


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
