"""One set of processes for all tests of this folder: each leaves runs that have trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.away.cases import thirds_of_cover
from tests.faults.away.world import World


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """A third of the cover's runs; the others are started for the tests that want them."""
    owner = World(tmp_path_factory.mktemp("away"))
    try:
        await owner.start()
        await owner.have(thirds_of_cover()[0])
        yield owner
    finally:
        await owner.close()
