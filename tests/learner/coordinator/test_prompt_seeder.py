"""The seeder of prompt tasks: what ends it ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.learner.coordinator.prompt_seeder import PromptSeeder, SeedingRules
from rollmesh.learner.data.stream import TaskWindow
from rollmesh.mesh.errors import RollmeshError, UnreachableError


class Prompts:
    """A dataset whose second window cannot be read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def after(self, cursor: int, count: int) -> TaskWindow:
        if cursor:
            raise self._error
        return TaskWindow([], last_ordinal=count, end=False)


@pytest.mark.parametrize(
    ("error", "said"),
    [(TypeError("no text"), "seeding prompts failed: TypeError: no text"), (UnreachableError("gone"), "gone")],
)
async def test_an_error_of_any_kind_is_told(error: Exception, said: str) -> None:
    async def seed(*_arguments: Any, **_more: Any) -> Any:
        return SimpleNamespace(pending=4)

    async def with_recovery(verb: Callable[[], Awaitable[None]]) -> None:
        await verb()

    told: asyncio.Future[RollmeshError] = asyncio.get_running_loop().create_future()
    seeder = PromptSeeder(
        cast(Any, SimpleNamespace(seed=seed)),
        cast(Any, Prompts(error)),
        cast(Any, SimpleNamespace(with_recovery=with_recovery)),
        SeedingRules(incarnation=1, batch=4, window=4),
        cursor=0,
        on_error=told.set_result,
    )
    await seeder.start()
    seeder.batch_used()
    assert (await asyncio.wait_for(told, 240)).message == said
    await seeder.close()
