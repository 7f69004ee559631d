"""The server of the page: who is let in, what a browser may do, and what is sent again."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from rollmesh.cli.observe.dashboard import _source
from rollmesh.dashboard.access import Access
from rollmesh.dashboard.page_files import plotly_gzipped, static_files
from rollmesh.dashboard.panels import PANELS
from rollmesh.dashboard.run_reader import RunReader
from rollmesh.dashboard.run_view import RunView
from rollmesh.dashboard.server import page_server
from rollmesh.launcher.folder import locked
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, DataError, PortInUseError
from tests.rollmesh.dashboard.runs import HOSTILE, StaticRuns, mesh_now, write_run

KEY = "the-key-of-this-test"


@asynccontextmanager
async def serving(*views: RunView) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session with the key, and the address of a server of runs."""
    async with page_server(StaticRuns(views), host="127.0.0.1", port=0, key=KEY) as url:
        parts = urlsplit(url)
        assert parts.fragment == f"key={KEY}", "the part of a URL that no browser sends"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            yield session, f"{parts.scheme}://{parts.netloc}"


async def test_data_need_the_key_and_the_page_holds_none() -> None:
    async with serving(RunView("demo", mesh=mesh_now())) as (session, at):
        async with aiohttp.ClientSession() as stranger:
            for path in ("/api/index", "/api/runs/0/head"):
                for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
                    async with stranger.get(at + path, headers=header) as answer:
                        assert answer.status == 401, (path, header)
                async with stranger.get(f"{at}{path}?key={KEY}", headers={"Cookie": f"key={KEY}"}) as answer:
                    assert answer.status == 401, "it counts in the header alone"
            async with stranger.get(f"{at}/") as answer:
                assert answer.status == 200
                assert "demo" not in await answer.text()
        async with session.get(f"{at}/api/index") as answer:
            assert [run["name"] for run in (await answer.json())["runs"]] == ["demo"]


@pytest.mark.parametrize("host", ["evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:80", "", "[::2]"])
async def test_a_foreign_name_of_this_machine_is_refused(host: str) -> None:
    """Another site may let its name resolve to loopback, and would then be of the same origin."""
    async with serving(RunView("demo")) as (session, at):
        for path in ("/", "/api/index", "/static/main.js"):
            async with session.get(at + path, headers={"Host": host}) as answer:
                assert answer.status == 403, path
        for good in ("localhost:1", "127.0.0.1", "[::1]:90"):
            async with session.get(f"{at}/", headers={"Host": good}) as answer:
                assert answer.status == 200, good


def test_off_loopback_any_name_may_lead_here() -> None:
    class Request:
        path = "/"
        headers = {"Host": "node-7.cluster"}

    assert Access(KEY, "0.0.0.0").refusal(Request()) is None  # type: ignore[arg-type]
    refused = Access(KEY, "127.0.0.1").refusal(Request())  # type: ignore[arg-type]
    assert refused is not None
    assert refused.status == 403


async def test_a_browser_may_load_and_run_only_what_is_ours() -> None:
    async with serving(RunView("demo")) as (session, at):
        for path in ("/", "/static/style.css", "/api/index", "/nothing"):
            async with session.get(at + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in answer.headers
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in rules["script-src"] + rules["style-src"]
        assert "http" not in policy


async def test_it_only_reads_and_only_its_own_files() -> None:
    async with serving(RunView("demo")) as (session, at):
        async with session.post(f"{at}/api/index") as answer:
            assert answer.status == 405
        for path in (
            "/static/../server.py",
            "/static/%2e%2e/server.py",
            "/static/page.html",
            "/static//etc/passwd",
            "/api/runs/1/head",
            "/api/runs/-1/head",
            "/api/runs/0/nothing",
            "/api/runs/0/head/x",
            "/etc/passwd",
        ):
            async with session.get(at + path) as answer:
                assert answer.status == 404, path
        async with session.get(f"{at}/plotly.min.js", auto_decompress=False) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(await answer.read()) == gzip.decompress(plotly_gzipped())


async def test_a_panel_is_sent_once(tmp_path: Path) -> None:
    async with serving(RunReader(write_run(tmp_path / "run", 10)).view) as (session, at):
        async with session.get(f"{at}/api/index") as answer:
            panels = (await answer.json())["runs"][0]["panels"]
        assert {"head", "attention", "charts", "ledger", "samples", "settings"} <= set(panels) <= set(PANELS)
        for name, tag in panels.items():
            async with session.get(f"{at}/api/runs/0/{name}") as answer:
                assert answer.headers["ETag"] == f'"{tag}"'
                assert await answer.json()
            async with session.get(f"{at}/api/runs/0/{name}", headers={"If-None-Match": f'"{tag}"'}) as answer:
                assert answer.status == 304


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("0.0.0.0", "localhost"), ("::", "[::1]")])
async def test_its_url_opens_in_a_browser(host: str, shown: str) -> None:
    async with page_server(StaticRuns([]), host=host, port=0) as url:
        assert url.startswith(f"http://{shown}:")
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200


async def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port}, for the page"):
            async with page_server(StaticRuns([]), host="127.0.0.1", port=port):
                pass


async def test_each_start_has_a_key_of_its_own_and_closes_its_runs() -> None:
    keys = set()
    for _ in range(2):
        runs = StaticRuns([])
        async with page_server(runs, host="127.0.0.1", port=0) as url:
            keys.add(urlsplit(url).fragment)
        assert runs.closed
    assert len(keys) == 2
    assert all(len(key) > 20 for key in keys)


def test_texts_never_become_html_nor_code() -> None:
    modules = {name: text for name, text in static_files().items() if name.endswith(".js")}
    dangerous = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|https?://(?!www\.w3\.org)"
    )
    assert not {name: found for name, text in modules.items() if (found := re.findall(dangerous, text))}


def test_every_panel_is_drawn_and_every_module_is_used() -> None:
    modules = {name: text for name, text in static_files().items() if name.endswith(".js")}
    listed = modules["panels/all.js"].partition("export const PANELS = {")[2].partition("};")[0]
    drawn = [line.strip().rstrip(",").partition(":")[0] for line in listed.splitlines() if line.strip()]
    assert drawn == list(PANELS), "in the order of the page"
    imported = {name for text in modules.values() for name in re.findall(r'"rollmesh/([\w/]+\.js)"', text)}
    assert imported | {"main.js"} == set(modules)


def test_data_in_a_page_of_one_file_end_no_script(tmp_path: Path) -> None:
    from rollmesh.dashboard.report import write_report

    page = write_report(write_run(tmp_path / "run", 6)).read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert "<" not in data
    assert json.loads(data)["panels"][0]["samples"]["samples"][0]["response"] == HOSTILE
    assert "window.hacked=1</script>" not in page
    assert len(page) < 3_000_000


async def test_the_command_takes_the_latest_run_and_says_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no run below runs/"):
        _source([], None, SecuritySection())
    first, second = (write_run(Path("runs", name), 2) for name in ("first", "second"))
    os.utime(first, (1, 1))
    assert _source([], None, SecuritySection())[1] == "second"
    with locked(first):
        assert _source([], None, SecuritySection())[1] == "first", "it is in progress"
    source, title = _source([first, second], None, SecuritySection())
    assert title == "first, second"
    await source.ask()
    assert [view.name for view in source.read()] == ["first", "second"]
    with pytest.raises(ConfigError, match="exclude each other"):
        _source([first], "127.0.0.1:1", SecuritySection())
