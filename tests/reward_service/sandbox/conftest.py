"""An executor on each rung, shared by the tests of a module; skipped with the reason where the host lacks it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Limits, Ran
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

Run = Callable[..., Awaitable[Ran]]


async def opened(rung: int, size: int = 2) -> Sandbox:
    """An executor on exactly this rung; skips where the host has none."""
    try:
        return await Sandbox.open(require=rung, highest=rung, size=size)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[2, 3], ids=["rung2", "rung3"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    sandbox = await opened(request.param)
    yield sandbox
    await sandbox.close()


@pytest.fixture(scope="module")
def run(sandbox: Sandbox) -> Run:
    """Runs the text of a Python program, with limits by name. Its time suffices on any machine, however busy."""

    async def run(source: str, *, stdin: bytes = b"", **limits: Any) -> Ran:
        given = {"cpu_s": 60.0, "wall_s": 120.0, **limits}
        return await sandbox.run(Job("python", {"main.py": source.encode()}, ["main.py"], stdin, Limits(**given)))

    return run


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """A folder that every account may read and write, with a file."""
    folder = Path(tempfile.mkdtemp(prefix="rollmesh-outside-"))
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("do not tell")
    secret.chmod(0o666)
    yield folder
    shutil.rmtree(folder)
