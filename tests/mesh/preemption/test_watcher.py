"""The watch for a notice, against metadata services on this machine and a file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.preemption.notice import Notice
from rollmesh.mesh.preemption.sources import source_of
from rollmesh.mesh.preemption.watcher import shutdown_at_notice, watch_for_notice
from rollmesh.mesh.runtime.service import Shutdown
from tests.mesh.preemption.metadata import MetadataServices

DEADLINE_S = 120.0


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
async def test_each_cloud_says_when_it_takes_the_machine_away(cloud: str) -> None:
    services = MetadataServices()
    services.behind_s = 300.0
    async with TestServer(services.application()) as server:
        source = source_of(f"{cloud}={server.make_url('/')}")
        assert await source.ask() is None
        services.preempted = True
        notice = await source.ask()
        assert notice is not None
        assert 20.0 < notice.within_s <= 30.0, "by the clock of the service"
        services.sessions.clear()
        assert await source.ask() is not None, "a session that has ended is opened again"
        assert services.opened == (2 if cloud == "aws" else 0)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
@pytest.mark.parametrize("instead", ["<html>\nlog in\n</html>", "[" * 100_000, "x" * 1_000_000])
async def test_what_something_else_answers_hides_no_later_notice(cloud: str, instead: str) -> None:
    services = MetadataServices()
    services.preempted, services.instead = True, instead
    async with TestServer(services.application()) as server:
        source = source_of(f"{cloud}={server.make_url('/')}")
        for _ in range(2):
            with pytest.raises(UnreachableError):
                await source.ask()
        services.instead = ""
        assert await source.ask() is not None


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
async def test_no_metadata_service_is_an_error_that_says_so(cloud: str) -> None:
    async with TestServer(MetadataServices().application()) as server:
        source = source_of(f"{cloud}={server.make_url('/')}")
        elsewhere = source_of(f"{cloud}={server.make_url('/nothing/here')}")
        with pytest.raises(UnreachableError, match=r"answers /.* with 404"):
            await elsewhere.ask()
    with pytest.raises(UnreachableError, match="does not answer"):
        await source.ask()


async def test_a_source_that_comes_and_goes_is_said_once_and_asked_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "notice"
    path.write_text("not yet")
    asked, source = 0, source_of(f"file:{path}")

    class Counting:
        async def ask(self) -> Notice | None:
            nonlocal asked
            asked += 1
            if asked == 3:
                path.unlink()
            if asked == 5:
                path.write_text("17")
            return await source.ask()

    given: list[Notice] = []
    await asyncio.wait_for(watch_for_notice(Counting(), given.append, every_s=0.0), DEADLINE_S)
    assert [notice.within_s for notice in given] == [17.0]
    assert asked == 5
    said = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in said[:2]] == [
        "notices of this machine's end are not seen",
        "notices of this machine's end are seen again",
    ]
    assert len(said) == 3


async def test_a_notice_requests_the_shutdown_with_the_time_that_is_left(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.touch()
    shutdown = Shutdown()
    async with shutdown_at_notice(source_of(f"file:{path}"), shutdown):
        await asyncio.wait_for(shutdown.requested.wait(), DEADLINE_S)
    shutdown.request("SIGTERM")
    assert (shutdown.reason, shutdown.within_s) == (f"{path} says that this machine ends", 30.0)


@pytest.mark.parametrize("text", ["", "ibm", "file:", "aws=", "aws=169.254.169.254", "http://x", "gcp:x"])
def test_other_sources_are_refused_with_the_list_of_them(text: str) -> None:
    with pytest.raises(ConfigError, match="no source of notices") as refused:
        source_of(text)
    assert "azure" in refused.value.hint
